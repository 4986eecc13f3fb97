"""A wrong setting or input is a ConfigurationError, and no Spark job is started for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkdist import ConfigurationError, Launcher, TorchDistributor
from tests.faults import programs

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def no_job(jobs: Callable[[], int], clean: None) -> Iterator[None]:
    """Asserts that the test started no job, and no process."""
    before = jobs()
    yield
    assert jobs() == before


def refusal(**settings: Any) -> str:
    """What the constructor says to a wrong setting."""
    with pytest.raises(ConfigurationError) as caught:
        TorchDistributor(**settings)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def refusal_of(entry: Any, *args: Any, local_mode: bool, **kwargs: Any) -> str:
    """What launching a wrong entry says."""
    with pytest.raises(ConfigurationError) as caught:
        TorchDistributor(2, local_mode=local_mode).launch(entry, *args, **kwargs)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2", None, 2.0])
def test_num_processes(number):
    assert refusal(num_processes=number) == f"num_processes must be an integer of at least 1, not {number!r}"


@pytest.mark.parametrize("setting", ["timeout", "start_timeout", "idle_timeout"])
@pytest.mark.parametrize("seconds", [math.nan, -1, 0, math.inf, "3", True, 1j, [3], 10**400])
def test_seconds(setting, seconds):
    text = refusal(**{setting: seconds})
    assert setting in text and "seconds" in text


@pytest.mark.parametrize("setting", ["start_timeout", "idle_timeout"])
def test_only_the_whole_run_may_be_without_limit(setting):
    assert setting in refusal(**{setting: None})


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("epochs", 3, "timeout"),  # an unknown one: those that there are are named
        ("logs", "some", "'rank0'"),
        ("logs", None, "'rank0'"),
        ("logs", ["all"], "'rank0'"),
        ("launcher", "mpirun", "'torchrun'"),
        ("launcher", True, "'torchrun'"),
        ("launcher", {}, "'torchrun'"),
        ("local_mode", "yes", "True, False or None"),
        ("use_gpu", 1, "True, False or None"),
        ("forward_env", "NCCL_*", "list of strings"),
        ("forward_env", [b"NCCL_*"], "hold strings"),
        ("forward_env", 3, "list of strings"),
        ("torchrun_args", ["--max-restarts=2"], 'launcher="torchrun"'),
        ("torchrun_args", "--max-restarts=2", "list of strings"),
    ],
)
def test_a_setting(setting, value, named):
    text = refusal(**{setting: value})
    assert setting in text and named in text


@pytest.mark.parametrize(
    "name",
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"],
)
@pytest.mark.parametrize("launcher", ["fast", "torchrun"])
def test_env_may_not_set_what_is_computed(name, launcher):
    assert name in refusal(env={name: "1"}, launcher=launcher)


@pytest.mark.parametrize(
    "env",
    [
        {"PLAIN": SECRET.encode()},
        {"PLAIN": [SECRET]},
        {"PLAIN": SECRET + "\0"},
        {"PLAIN": None},
        {"": "empty"},
        {"A=B": "c"},
        {3: "c"},
        [("PLAIN", SECRET)],
        f"PLAIN={SECRET}",
    ],
    ids=repr,
)
def test_env_holds_names_and_strings_and_its_values_stay_secret(env):
    text = refusal(env=env)
    assert text.startswith("env") and SECRET not in text


def test_ship_names_what_exists_and_each_name_once(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.json").touch()
    missing = str(tmp_path / "missing.json")
    assert missing in refusal(ship=[missing])
    twice = refusal(ship=[tmp_path / "a/data.json", tmp_path / "b/data.json"])
    assert "data.json" in twice
    assert "list" in refusal(ship=str(tmp_path / "a/data.json"))


@pytest.mark.parametrize(
    "option",
    [
        "--nnodes=3",
        "--nproc-per-node=2",
        "--nproc_per_node=2",
        "--rdzv-endpoint=host:1",
        "--standalone",
        "-m",
    ],
)
def test_torchrun_options_that_are_ours(option):
    assert option in refusal(launcher="torchrun", torchrun_args=[option])


def test_frameworks():
    with pytest.raises(ConfigurationError, match="'plain' has no launcher 'torchrun'"):
        Launcher("plain", launcher="torchrun")
    with pytest.raises(ConfigurationError, match="framework must be one of horovod, plain, torch, not 'jax'"):
        Launcher("jax")


# --- what is launched ---------------------------------------------------------------------------

places = pytest.mark.parametrize("local_mode", [False, True], ids=["spark", "local"])


@places
def test_a_script_that_is_none(local_mode, tmp_path: Path):
    missing = str(tmp_path / "missing.py")
    assert missing in refusal_of(missing, local_mode=local_mode)
    assert str(tmp_path) in refusal_of(tmp_path, local_mode=local_mode)


@places
def test_a_script_with_keyword_arguments(local_mode, tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()
    text = refusal_of(script, "--epochs=3", lr=0.1, local_mode=local_mode)
    assert "lr" in text and "keyword" in text


@places
@pytest.mark.parametrize("entry", [3, None, b"train.py", ["train.py"]])
def test_neither_function_nor_script(local_mode, entry):
    assert repr(entry) in refusal_of(entry, local_mode=local_mode)


def test_nothing_to_launch():
    with pytest.raises(TypeError, match="the function, or the path of a script"):
        TorchDistributor(2).run()


@places
@pytest.mark.parametrize(
    "thing",
    [
        "SparkSession",
        pytest.param("SparkContext", marks=pytest.mark.classic),
        "DataFrame",
        "lock",
        "open file",
    ],
)
def test_a_closure_that_cannot_travel(local_mode, thing, spark, tmp_path: Path):
    with open(tmp_path / "data", "w") as stream:
        captured = {
            "SparkSession": lambda: spark,
            "SparkContext": lambda: spark.sparkContext,
            "DataFrame": lambda: spark.range(1),
            "lock": threading.Lock,
            "open file": lambda: stream,
        }[thing]()

        def train() -> None:
            print(captured)

        text = refusal_of(train, local_mode=local_mode)
        assert thing in text and "'captured'" in text and "train" in text
        assert thing in refusal_of(programs.take, captured, local_mode=local_mode)


@pytest.mark.classic
def test_more_than_spark_can_carry(spark):
    heap = spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory()
    text = refusal_of(programs.take, bytes(heap // 2), local_mode=False)
    assert f"more than the {heap // 2 / 1e6:.1f} MB" in text
    assert "argument" in text and "ship=" in text
