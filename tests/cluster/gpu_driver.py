"""A driver on a cluster that hands out GPUs, as a script: it prints what ranks of each case saw, as JSON.

Usage: gpu_driver.py MASTER "ADDRESSES THAT ARE DISCOVERED" TASK_AMOUNT [CUDA_VISIBLE_DEVICES of executors]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from sparkdist import Launcher
from sparkdist.driver.slots import all_slots


def main(master: str, discovered: str, amount: str, preset: str | None = None) -> None:
    with TemporaryDirectory() as folder:
        script = Path(folder, "discover.sh")
        addresses = json.dumps({"name": "gpu", "addresses": discovered.split(",")})
        script.write_text(f"#!/bin/sh\necho '{addresses}'\n")
        script.chmod(0o755)
        builder = SparkSession.builder.master(master).config("spark.ui.enabled", False)
        count = len(discovered.split(","))
        for owner in ("worker", "executor"):
            builder = builder.config(f"spark.{owner}.resource.gpu.amount", count)
            builder = builder.config(f"spark.{owner}.resource.gpu.discoveryScript", str(script))
        if master.startswith("local["):
            builder = builder.config("spark.driver.resource.gpu.amount", count)
            builder = builder.config("spark.driver.resource.gpu.discoveryScript", str(script))
        builder = builder.config("spark.task.resource.gpu.amount", amount)
        if preset is not None:
            builder = builder.config("spark.executorEnv.CUDA_VISIBLE_DEVICES", preset)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        try:
            print(json.dumps({name: attempt(**case) for name, case in CASES.items()}))
        finally:
            session.stop()


def seen() -> tuple[str, ...]:
    return os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES", "unset")


CASES: dict[str, dict[str, Any]] = {
    "4 ranks": {"num_processes": 4},
    "3 ranks": {"num_processes": 3},
    "no GPUs": {"num_processes": 2, "use_gpu": False},
    "too many": {"num_processes": 400},
    "profile": {"num_processes": 4, "resources": {"gpu": 2}},
    "all slots": {"num_processes": None},
    "all slots, no GPUs": {"num_processes": None, "use_gpu": False},
}


def attempt(**arguments: Any) -> dict[str, Any]:
    began = time.monotonic()
    try:
        if "resources" in arguments:
            requests = TaskResourceRequests().cpus(1).resource("gpu", arguments["resources"]["gpu"])
            arguments["resources"] = ResourceProfileBuilder().require(requests).build
        if arguments["num_processes"] is None:
            arguments["num_processes"] = all_slots(None, None, arguments.get("use_gpu"))
        outcome: Any = Launcher("plain", local_mode=False, timeout=60, **arguments).launch(seen).values
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main(*sys.argv[1:])
