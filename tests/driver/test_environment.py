"""Which variables ranks get from the driver, and which win."""

from __future__ import annotations

import os

import pytest

from sparkdist.driver.environment import for_ranks
from sparkdist.errors import ConfigurationError
from sparkdist.frameworks.torch import TORCHRUN_ENV
from sparkdist.settings import Settings


@pytest.fixture
def driver(monkeypatch):
    """Sets variables in this process, which has no others."""
    for name in os.environ:
        monkeypatch.delenv(name)

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def forwarded(reserved=frozenset(), **settings):
    # pytest names the running test, and its phase, in a variable that it sets again and again.
    found = for_ranks(Settings(**settings), reserved)
    return {name: value for name, value in found.items() if name != "PYTEST_CURRENT_TEST"}


def test_tuning_goes_along_and_nothing_else(driver):
    tuning = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth7",
        "TORCH_LOGS": "+dynamo",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
        "KMP_AFFINITY": "none",
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "7",
        "TOKENIZERS_PARALLELISM": "false",
    }
    driver(**tuning, HOME="/home", PATH="/bin", LANG="C", MY_TORCH_FLAG="1", nccl_debug="x")
    assert forwarded() == tuning


def test_env_beats_forward_env(driver):
    driver(NCCL_DEBUG="INFO", NCCL_ALGO="Ring")
    env = {"NCCL_DEBUG": "WARN", "MINE": "1"}
    assert forwarded(env=env) == {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring", "MINE": "1"}


def test_names_and_globs_and_none(driver):
    driver(RUN_A="a", RUN_B="b", RUN="r", OTHER="o", NCCL_DEBUG="INFO")
    assert forwarded(forward_env=["RUN_?", "OTHER"]) == {
        "RUN_A": "a",
        "RUN_B": "b",
        "OTHER": "o",
    }
    assert forwarded(forward_env=["RUN_[A]", "ABSENT"]) == {"RUN_A": "a"}
    assert forwarded(forward_env=[]) == {}


SECRETS = [
    "HF_TOKEN",
    "TORCH_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "WANDB_API_KEY",
    "DB_PASSWORD",
    "PGPASSWD",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "my_secret",
]


@pytest.mark.parametrize("name", SECRETS)
def test_a_credential_goes_along_by_its_own_name_only(driver, name):
    driver(**{name: "hush", "TOKENIZERS_PARALLELISM": "false"})
    everything = ["*", f"{name[:3]}*", f"{name[:-1]}?"]
    assert forwarded(forward_env=everything) == {"TOKENIZERS_PARALLELISM": "false"}
    assert forwarded(forward_env=[name]) == {name: "hush"}
    assert forwarded(env={name: "given"}) == {name: "given", "TOKENIZERS_PARALLELISM": "false"}


def test_what_a_driver_that_is_a_rank_has_is_not_forwarded(driver):
    driver(RANK="5", MASTER_ADDR="elsewhere", TORCHELASTIC_RUN_ID="outer", NCCL_DEBUG="INFO")
    assert forwarded(TORCHRUN_ENV, forward_env=["*"]) == {"NCCL_DEBUG": "INFO"}
    assert forwarded(TORCHRUN_ENV, forward_env=["RANK"]) == {}


def test_a_refusal_names_the_variable_and_not_its_value():
    with pytest.raises(ConfigurationError, match="env: MASTER_PORT is computed") as caught:
        for_ranks(Settings(env={"MASTER_PORT": "29512", "MINE": "1"}), TORCHRUN_ENV)
    assert "29512" not in str(caught.value)


def test_the_values_are_in_no_repr(driver):
    driver(PLAIN="from the driver")
    settings = Settings(env={"HF_TOKEN": "hush"}, forward_env=("PLAIN",))
    assert "hush" not in repr(settings) and "from the driver" not in repr(settings)
