"""GPUs that Spark hands to tasks. None is here: a discovery script names some, as an administrator's does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

DRIVER = Path(__file__).with_name("gpu_driver.py")


def outcomes(*arguments: str) -> dict[str, Any]:
    """Runs the driver; returns what became of each of its cases."""
    command = [sys.executable, str(DRIVER), *arguments]
    environ = {**os.environ, "PYTHONPATH": str(DRIVER.parents[2])}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=140, env=environ)
    cases = json.loads(done.stdout.splitlines()[-1])
    assert cases["too many"]["seconds"] < 8
    return {name: case["outcome"] for name, case in cases.items()}


def own_gpus(seen: list[list[str]]) -> list[str]:
    """The GPU of each rank: LOCAL_RANK is its place among those that the node sees."""
    return [devices.split(",")[int(local_rank)] for local_rank, devices in seen]


def test_one_gpu_for_each_task_on_two_executors():
    seen = outcomes("local-cluster[2,2,1024]", "0,1", "1")
    assert [local_rank for local_rank, _ in seen["4 ranks"]] == ["0", "1", "0", "1"]
    gpus = own_gpus(seen["4 ranks"])
    assert set(gpus[:2]) == set(gpus[2:]) == {"0", "1"}
    assert len(seen["3 ranks"]) == 3
    assert [devices for _, devices in seen["no GPUs"]] == ["unset", "unset"]
    assert [local_rank for local_rank, _ in seen["profile"]] == ["0", "1", "0", "1"]  # of two tasks
    assert set(own_gpus(seen["profile"])[:2]) == {"0", "1"}
    assert own_gpus(seen["all slots"]) == gpus
    assert len(seen["all slots, no GPUs"]) == 4
    assert "400 slots" in seen["too many"]
    assert "has 4" in seen["too many"]


def test_two_gpus_for_each_task_that_are_named_in_every_way():
    seen = outcomes("local-cluster[1,4,1024]", "2,GPU-aa,MIG-b/1/0,3", "2", "5,6,7,8")
    assert sorted(own_gpus(seen["4 ranks"])) == ["7", "8", "GPU-aa", "MIG-b/1/0"]
    assert len({devices for _, devices in seen["4 ranks"]}) == 1
    assert seen["3 ranks"].startswith("ConfigurationError: num_processes=3 is not a multiple of the 2 GPUs")
    assert [devices for _, devices in seen["no GPUs"]] == ["5,6,7,8"] * 2
    assert [local_rank for local_rank, _ in seen["all slots"]] == ["0", "1", "2", "3"]  # of two tasks
    assert len(seen["all slots, no GPUs"]) == 2


def test_an_executor_with_fewer_devices_than_spark_believes():
    seen = outcomes("local-cluster[1,4,1024]", "0,1,2,3", "1", "5")
    assert "CUDA_VISIBLE_DEVICES=5 of the executor has 1" in seen["4 ranks"]
    assert len(seen["no GPUs"]) == 2


def test_a_part_of_a_gpu():
    seen = outcomes("local-cluster[1,2,1024]", "0", "0.5")
    assert "gives a task 0.5 of a GPU" in seen["4 ranks"]
    # resources= counts before the conf, and Spark has its own word on it.
    assert "PreflightError: resources= cannot be used on this cluster" in seen["profile"]
    assert len(seen["no GPUs"]) == 2


def test_a_local_master_that_claims_to_have_gpus():
    seen = outcomes("local[4]", "0,1", "1")
    for name, case in seen.items():
        if name.startswith("all slots"):
            assert "PreflightError" in case  # there are none, or nobody can tell
            continue
        assert "a local master (local[4]) has no GPUs to give" in case
