"""What a large return value costs: 256 MB from rank 0 of 2, warm, against pyspark's TorchDistributor.

Time is that of the whole run. Memory is the driver's: how far the peaks of its Python process and
of its JVM rise above what they held before the run, added up. On local[2] executors are in that
JVM, and what they hold counts. Both get a heap of 4 GB: pyspark's run ends the JVM with less.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from harness import Commands, Figures, Row, Subject, main, spread, warm

MB = 1 << 20
SIZE = 256 * MB
HEAP = "4g"
MEMORY = "driver memory, MB"

OURS, PYSPARK = "sparkdist", "pyspark.ml.torch.distributor"


def make(size: int) -> object:
    import torch

    # Random: zeros would be pages that the kernel shares.
    return torch.rand(size // 4) if os.environ["RANK"] == "0" else None


class DriverMemory:
    """The resident memory of this process and of the JVM below it."""

    def __init__(self) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        (jvm,) = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "java\n"]
        self._pids = ["self", jvm]
        self._before: dict[str, int] = {}

    def start(self) -> None:
        """Forgets peaks that were, and notes what is held now."""
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM becomes VmRSS: see proc(5)
            self._before[pid] = self._read(pid, "VmRSS")

    def rise(self) -> int:
        """How many bytes the peaks since `start` are above what was held then."""
        return sum(max(0, self._read(pid, "VmHWM") - self._before[pid]) for pid in self._pids)

    @staticmethod
    def _read(pid: str, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        assert found, name
        return int(found[1]) << 10


def distributor(module: str) -> Callable[[], Figures]:
    from pyspark.sql import SparkSession

    # Spark would look for a python3 on PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
    # For the peer: it sends the value through the JVM, which ends with Spark's default of 1 GB.
    builder.config("spark.driver.memory", HEAP).getOrCreate()
    cls = import_module(module).TorchDistributor
    import torch  # what unpickling the value needs is no part of the value

    memory = DriverMemory()

    def run() -> Figures:
        memory.start()
        value = cls(2, local_mode=False, use_gpu=False).run(make, SIZE)
        rise = memory.rise()
        assert isinstance(value, torch.Tensor) and value.nbytes == SIZE
        return {MEMORY: rise / MB}

    return run


SUBJECTS = {
    name: Subject(
        f"{module}.TorchDistributor(2, local_mode=False, use_gpu=False).run(make, {SIZE}), "
        f"spark.driver.memory={HEAP}",
        partial(distributor, module),
    )
    for name, module in (("sparkdist", OURS), ("pyspark", PYSPARK))
}


def compare(commands: Commands, repeats: int) -> list[Row]:
    samples = warm("sparkdist", "pyspark", commands, repeats)
    memory = {name: [run[MEMORY] for run in runs] for name, runs in samples.items()}
    case = f"{SIZE // MB} MB, warm, local[2]"
    print(f"Driver memory of pyspark: {spread(memory['pyspark'], 'MB')},", end=" ")
    print(f"{statistics.median(memory['pyspark']) * MB / SIZE:.2f} x the value's size.\n")
    return [
        Row.of(case, samples, "sparkdist", "pyspark", 0.33),
        Row(
            case=f"driver memory, {case}",
            peer="the value's size",
            ours=memory["sparkdist"],
            theirs=[SIZE / MB],
            limit=3,
            unit="MB",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("A large return value", __doc__, SUBJECTS, compare))
