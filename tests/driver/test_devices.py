"""The driver's GPUs. No machine of ours has any: nvidia-smi is a script that says what we tell it to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkdist import ConfigurationError, TorchDistributor
from sparkdist.driver import devices
from sparkdist.driver.devices import driver_gpus

MODEL = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi first on PATH: of so many GPUs, or one that behaves otherwise."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Alone but for what the script itself needs: a real one of this machine must not answer.
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(gpus=0, script=None):
        lines = [f"GPU {i}: {MODEL} (UUID: {uuid(i)})" for i in range(gpus)]
        body = script or "".join(f"echo '{line}'\n" for line in lines)
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\n[ "$*" = -L ] || exit 2\n{body}')
        program.chmod(0o700)
        return program

    return install


def uuid(index):
    return f"GPU-{index:08d}-0000-4000-8000-000000000000"


def test_the_first_of_them_one_for_each_rank(nvidia_smi):
    nvidia_smi(gpus=4)
    for use_gpu in (True, None):
        assert driver_gpus(use_gpu, 1) == {"CUDA_VISIBLE_DEVICES": "0"}
        assert driver_gpus(use_gpu, 4) == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def test_more_than_ten(nvidia_smi):
    nvidia_smi(gpus=16)
    assert driver_gpus(True, 12)["CUDA_VISIBLE_DEVICES"].split(",") == [str(i) for i in range(12)]


def test_parts_of_a_gpu_are_not_counted_as_gpus(nvidia_smi):
    part = f"  MIG 1g.10gb     Device  0: (UUID: MIG-{uuid(9)})"
    nvidia_smi(script=f"echo 'GPU 0: {MODEL} (UUID: {uuid(0)})'\necho '{part}'\n")
    with pytest.raises(ConfigurationError, match="has 1"):
        driver_gpus(None, 2)


@pytest.mark.parametrize("use_gpu", [True, None])
def test_too_few_is_an_error_and_no_silent_reduction(nvidia_smi, use_gpu):
    nvidia_smi(gpus=2)
    with pytest.raises(ConfigurationError) as caught:
        driver_gpus(use_gpu, 3)
    text = str(caught.value)
    assert "num_processes=3" in text and "has 2" in text
    assert "use_gpu=False" in text and "spark.task.resource.gpu.amount" in text


@pytest.mark.parametrize(
    ("preset", "ranks", "seen"),
    [
        ("2,3", 2, "2,3"),
        ("3", 1, "3"),
        (" 1 , 2 ", 2, "1,2"),
        ("3,1,2", 2, "3,1"),
        (f"{uuid(1)},{uuid(0)}", 2, f"{uuid(1)},{uuid(0)}"),
    ],
)
def test_what_the_user_chose_is_what_ranks_see(nvidia_smi, monkeypatch, preset, ranks, seen):
    nvidia_smi(gpus=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", preset)
    assert driver_gpus(None, ranks) == driver_gpus(True, ranks) == {"CUDA_VISIBLE_DEVICES": seen}
    with pytest.raises(ConfigurationError, match=f"has {len(preset.split(','))}"):
        driver_gpus(None, 4)


@pytest.mark.parametrize("preset", ["", "-1", " "])
def test_the_user_hid_all_of_them(nvidia_smi, monkeypatch, preset):
    nvidia_smi(gpus=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", preset)
    assert driver_gpus(None, 2) == {}
    with pytest.raises(ConfigurationError, match="has 0"):
        driver_gpus(True, 1)


@pytest.mark.parametrize(
    "script",
    [
        "echo 'NVIDIA-SMI has failed because it could not talk to the driver' >&2\nexit 9\n",
        "echo 'No devices were found'\n",
        "",
    ],
    ids=["no driver", "no devices", "nothing"],
)
def test_a_machine_without_gpus_that_work(nvidia_smi, monkeypatch, script):
    nvidia_smi(script=script or ":\n")
    # Left over in the environment of many a machine without any.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert driver_gpus(None, 8) == {}
    with pytest.raises(ConfigurationError, match="has 0"):
        driver_gpus(True, 1)


def test_no_nvidia_smi_at_all(nvidia_smi):
    assert driver_gpus(None, 8) == {}
    with pytest.raises(ConfigurationError, match="has 0"):
        driver_gpus(True, 1)


def test_one_that_does_not_answer_is_given_up(nvidia_smi, monkeypatch):
    nvidia_smi(script="exec 3<&1\nread forever </dev/zero\n")
    monkeypatch.setattr(devices, "_QUERY_TIME", 0.2)
    assert driver_gpus(None, 8) == {}


def test_gpus_left_alone_are_not_even_asked_for(nvidia_smi, tmp_path):
    nvidia_smi(script=f": > {tmp_path}/asked\n")
    assert driver_gpus(False, 100) == {}
    assert not (tmp_path / "asked").exists()
    assert driver_gpus(None, 100) == {}
    assert (tmp_path / "asked").exists()


def sees():
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["LOCAL_RANK"]


def test_ranks_on_the_driver_see_them(nvidia_smi, clean):
    nvidia_smi(gpus=4)

    def values(use_gpu, **settings):
        return TorchDistributor(2, True, use_gpu, **settings).launch(sees).values

    assert values(True) == values(None) == [("0,1", "0"), ("0,1", "1")]
    assert values(False) == [(None, "0"), (None, "1")]
    assert values(None, env={"CUDA_VISIBLE_DEVICES": "3,2"}) == [("3,2", "0"), ("3,2", "1")]


def test_too_few_starts_nothing(nvidia_smi, tmp_path: Path):
    nvidia_smi(gpus=1)
    with pytest.raises(ConfigurationError, match="has 1"):
        TorchDistributor(2, True, True).run((tmp_path / "entered").touch)
    assert not (tmp_path / "entered").exists()


def test_on_spark_the_session_offers_them_and_not_the_driver(spark, nvidia_smi):
    nvidia_smi(gpus=4)
    with pytest.raises(ConfigurationError, match="spark.task.resource.gpu.amount"):
        TorchDistributor(2, False, True).run(sees)
    assert TorchDistributor(2, False, None).launch(sees).values == [(None, "0"), (None, "1")]
