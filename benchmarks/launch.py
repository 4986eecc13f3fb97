"""What a launch costs: 2 gloo ranks, one all_reduce, against pyspark's TorchDistributor and torchrun.

Cold: a new session in a new process, hence no forkserver and no Python worker yet; the session's
own start is not counted. Warm: the second and later runs of one session.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from harness import Commands, Row, Subject, fresh, main, warm

EXPECTED = 3.0  # rank + 1, over two ranks


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def rank() -> int:
    return int(os.environ["RANK"])


# --- the subjects: each prepares, and returns what is timed ---------------------------------------

OURS, PYSPARK = "sparkdist", "pyspark.ml.torch.distributor"
CLUSTER = "local-cluster[2,1,1024]"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "all_reduce.py"]


def session(master: str, connect: bool = False) -> None:
    from pyspark.sql import SparkSession

    # Spark would look for a python3 on PATH, and keep executors' folders inside its installation.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if master.startswith("local-cluster"):
        session.folder = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]
        os.environ["SPARK_WORKER_DIR"] = session.folder.name  # type: ignore[attr-defined]
    builder = SparkSession.builder.remote(master) if connect else SparkSession.builder.master(master)
    builder.config("spark.ui.enabled", False).getOrCreate()


def distributor(
    module: str, local_mode: bool, master: str = "local[2]", connect: bool = False
) -> Callable[[], None]:
    session(master, connect)
    cls = import_module(module).TorchDistributor

    def run() -> None:
        value = cls(2, local_mode=local_mode, use_gpu=False).run(all_reduce)
        assert value == EXPECTED, value

    return run


def plain(count: int) -> Callable[[], None]:
    from sparkdist import Launcher

    session("local[64]")

    def run() -> None:
        values = Launcher("plain", num_processes=count, local_mode=False, use_gpu=False).launch(rank).values
        assert values == list(range(count)), values

    return run


def torchrun() -> Callable[[], None]:
    # A script cannot return a value: it asserts.
    source = f"{inspect.getsource(all_reduce)}\n\nassert all_reduce() == {EXPECTED}\n"

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "all_reduce.py").write_text(source)
            subprocess.run([sys.executable, *TORCHRUN], cwd=folder, check=True)

    return run


def call(module: str, local_mode: bool, where: str = "local[2]") -> str:
    return f"{module}.TorchDistributor(2, local_mode={local_mode}, use_gpu=False).run(all_reduce) on {where}"


SUBJECTS = {
    "torchrun": Subject(" ".join(["python", *TORCHRUN]), torchrun),
    **{
        name: Subject(call(module, local_mode), partial(distributor, module, local_mode))
        for name, module, local_mode in (
            ("sparkdist", OURS, False),
            ("pyspark", PYSPARK, False),
            ("sparkdist local_mode", OURS, True),
            ("pyspark local_mode", PYSPARK, True),
        )
    },
    **{
        f"{name} on a cluster": Subject(
            call(module, False, CLUSTER), partial(distributor, module, False, CLUSTER)
        )
        for name, module in (("sparkdist", OURS), ("pyspark", PYSPARK))
    },
    "sparkdist Connect": Subject(
        call(OURS, False, 'SparkSession.builder.remote("local[2]")'),
        partial(distributor, OURS, False, connect=True),
    ),
    "sparkdist classic": Subject(call(OURS, False), partial(distributor, OURS, False)),
    **{
        f"{count} ranks": Subject(
            f'sparkdist.Launcher("plain", num_processes={count}, local_mode=False).launch(rank) on local[64]',
            partial(plain, count),
        )
        for count in (64, 4)
    },
}


# --- the comparison -------------------------------------------------------------------------------


def compare(commands: Commands, repeats: int) -> list[Row]:
    cold = fresh({name: commands[name] for name in ("sparkdist", "pyspark", "torchrun")}, repeats)
    rows = [
        Row.of("cold, local[2]", cold, "sparkdist", "pyspark", 0.35),
        Row.of("cold, local[2]", cold, "sparkdist", "torchrun", 0.8),
    ]
    for case, ours, peer, limit in (
        ("warm, local[2]", "sparkdist", "pyspark", 0.05),
        ("warm, local_mode=True", "sparkdist local_mode", "pyspark local_mode", 0.10),
        (f"warm, {CLUSTER}", "sparkdist on a cluster", "pyspark on a cluster", 0.06),
        ("warm, Connect on local[2]", "sparkdist Connect", "sparkdist classic", 1.5),
        ("warm, 64 plain ranks on local[64]", "64 ranks", "4 ranks", 10),
    ):
        rows.append(Row.of(case, warm(ours, peer, commands, repeats), ours, peer, limit))
    return rows


if __name__ == "__main__":
    sys.exit(main("Launch", __doc__, SUBJECTS, compare))
