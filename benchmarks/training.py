"""What training costs inside a run: steps of a small DDP model on 2 gloo ranks, against bare torchrun.

Steps are timed inside the function, after some to warm up: what starts a run does not count here.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import Commands, Figures, Row, Subject, main, warm

STEP = "ms per step"
PAIRS = 10
SLOWEST = 1 / 0.97  # of torchrun's time: steps per second not below 0.97 of its


def train() -> float:
    """Returns the seconds per step."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    warm_up, steps = 50, 400
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layers = [nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 128), torch.randint(10, (64,))
    started = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            dist.barrier()
            started = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - started
    dist.destroy_process_group()
    return seconds / steps


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]


def sparkdist() -> Callable[[], Figures]:
    from pyspark.sql import SparkSession

    from sparkdist import TorchDistributor

    # Spark would look for a python3 on PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    distributor = TorchDistributor(2, local_mode=False, use_gpu=False)
    return lambda: {STEP: 1000 * distributor.run(train)}


def torchrun() -> Callable[[], Figures]:
    source = (
        f"import os\n\n\n{inspect.getsource(train)}\n\nseconds = train()\n"
        "if os.environ['RANK'] == '0':\n    open('seconds', 'w').write(str(seconds))\n"
    )

    def run() -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text(source)
            subprocess.run([sys.executable, *TORCHRUN], cwd=folder, check=True)
            return {STEP: 1000 * float(Path(folder, "seconds").read_text())}

    return run


SUBJECTS = {
    "sparkdist": Subject(
        "sparkdist.TorchDistributor(2, local_mode=False, use_gpu=False).run(train)", sparkdist
    ),
    "torchrun": Subject(" ".join(["python", *TORCHRUN]), torchrun),
}


def compare(commands: Commands, repeats: int) -> list[Row]:
    samples = warm("sparkdist", "torchrun", commands, repeats)
    return [Row.of("a DDP step, local[2]", samples, "sparkdist", "torchrun", SLOWEST, STEP, "ms")]


if __name__ == "__main__":
    sys.exit(main("Training", __doc__, SUBJECTS, compare, PAIRS))
