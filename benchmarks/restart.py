"""What recovery costs: from a fault to all ranks back in the function, with 2 gloo ranks.

A rank that is killed: against a warm launch of the same function, and against torchrun's restart.
An executor that is killed: from when Spark has a replacement, against the first launch on a new
cluster, since both find an executor that has not imported the framework yet.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import Commands, Figures, Row, Subject, fresh, main, warm
from launch import CLUSTER, session

RECOVERY = "recovery"

TRAIN = '''
import os, signal, sys, time
from pathlib import Path

def train(folder, kill):
    """Meets the other rank; in the first attempt then ends, or waits to be ended."""
    import torch
    import torch.distributed as dist
    rank, attempt = int(os.environ["RANK"]), os.environ["ATTEMPT"]
    Path(folder, f"back-{attempt}-{rank}").write_text(str(time.time()))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if attempt == "0":
        Path(folder, f"up-{rank}").write_text(str(time.time()))
        if kill and rank == 1:
            Path(folder, "fault").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.destroy_process_group()
'''
SCRIPT = (
    TRAIN + '\nos.environ["ATTEMPT"] = os.environ["TORCHELASTIC_RESTART_COUNT"]\ntrain(sys.argv[1], True)\n'
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
# Else its ranks find the addresses of the attempt before in the store, and gloo fails to connect.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def train(folder: str, kill: bool) -> None:
    os.environ["ATTEMPT"] = os.environ["SPARKDIST_ATTEMPT"]
    namespace: dict[str, Any] = {}
    exec(TRAIN, namespace)
    namespace["train"](folder, kill)


def moment(folder: str, name: str) -> float:
    return float(Path(folder, name).read_text())


def back(folder: str) -> float:
    """When the last rank was back."""
    return max(moment(folder, f"back-1-{rank}") for rank in range(2))


# --- the subjects -------------------------------------------------------------------------------


def killed_rank() -> Callable[[], Figures]:
    from sparkdist import TorchDistributor

    session("local[2]")

    def run() -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            TorchDistributor(2, local_mode=False, use_gpu=False, max_restarts=1).run(train, folder, True)
            return {RECOVERY: back(folder) - moment(folder, "fault")}

    return run


def launch() -> Callable[[], Figures]:
    """From the call until all ranks are in the function: what recovery is compared with."""
    from sparkdist import TorchDistributor

    session("local[2]")

    def run() -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            TorchDistributor(2, local_mode=False, use_gpu=False, env={"ATTEMPT": "1"}).run(enter, folder)
            return {}

    return run


def enter(folder: str) -> None:
    namespace: dict[str, Any] = {}
    exec(TRAIN, namespace)
    namespace["train"](folder, False)


def torchrun() -> Callable[[], Figures]:
    def run() -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text(SCRIPT)
            command = [sys.executable, *TORCHRUN, "train.py", folder]
            subprocess.run(command, cwd=folder, env=os.environ | NEW_STORE, check=True)
            return {RECOVERY: back(folder) - moment(folder, "fault")}

    return run


def cluster() -> Any:
    """Starts a session and returns Spark's own context, once both executors are there."""
    from pyspark.sql import SparkSession

    session(CLUSTER)
    scala = SparkSession.getActiveSession().sparkContext._jsc.sc()  # type: ignore[union-attr]
    wait(lambda: executors(scala) == 2)
    return scala


def killed_executor() -> Callable[[], Figures]:
    from sparkdist import TorchDistributor

    scala = cluster()

    def run() -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            replaced: list[float] = []
            killer = threading.Thread(target=kill_and_watch, args=(scala, folder, replaced))
            killer.start()
            TorchDistributor(2, local_mode=False, use_gpu=False).run(train, folder, False)
            killer.join()
            return {RECOVERY: back(folder) - replaced[0]}

    return run


def kill_and_watch(scala: Any, folder: str, replaced: list[float]) -> None:
    """Kills an executor once both ranks are up, and notes when Spark has two again."""
    wait(lambda: all(Path(folder, f"up-{rank}").exists() for rank in range(2)))
    os.kill(max(executor_pids()), signal.SIGKILL)
    wait(lambda: executors(scala) < 2)
    wait(lambda: executors(scala) == 2)
    replaced.append(time.time())


def executors(scala: Any) -> int:
    return int(scala.getExecutorMemoryStatus().size()) - 1  # the driver is in it, too


def executor_pids() -> list[int]:
    lines = {int(path.parent.name): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, line in lines.items() if b"CoarseGrainedExecutorBackend" in line]


def wait(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def new_cluster() -> Callable[[], Figures]:
    """The first launch on executors that are there."""
    from sparkdist import TorchDistributor

    cluster()

    def run() -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            started = time.time()
            TorchDistributor(2, local_mode=False, use_gpu=False, env={"ATTEMPT": "1"}).run(enter, folder)
            return {RECOVERY: back(folder) - started}

    return run


CALL = "sparkdist.TorchDistributor(2, local_mode=False, use_gpu=False{}).run(train) on {}"
SUBJECTS = {
    "a killed rank": Subject(CALL.format(", max_restarts=1", "local[2]"), killed_rank),
    "a warm launch": Subject(CALL.format("", "local[2]"), launch),
    "torchrun": Subject(
        " ".join(["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python", *TORCHRUN, "train.py"]), torchrun
    ),
    "a killed executor": Subject(CALL.format("", CLUSTER), killed_executor),
    "a new cluster": Subject(CALL.format("", CLUSTER), new_cluster),
}


def compare(commands: Commands, repeats: int) -> list[Row]:
    launches = warm("a killed rank", "a warm launch", commands, repeats)
    peers = fresh({"torchrun": commands["torchrun"]}, repeats)
    clusters = fresh({name: commands[name] for name in ("a killed executor", "a new cluster")}, repeats)
    recovery = [run[RECOVERY] for run in launches["a killed rank"]]
    row = partial(Row, case="a rank is killed: all ranks are back, local[2]", ours=recovery)
    return [
        row(peer="a warm launch", theirs=[run["seconds"] for run in launches["a warm launch"]], limit=2),
        row(peer="torchrun", theirs=[run[RECOVERY] for run in peers["torchrun"]], limit=0.5),
        Row.of(
            f"an executor is killed: from its replacement, {CLUSTER}",
            clusters,
            "a killed executor",
            "a new cluster",
            1.5,
            figure=RECOVERY,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("Recovery", __doc__, SUBJECTS, compare))
