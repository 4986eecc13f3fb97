"""What a launch costs: 2 gloo ranks, one all_reduce, against pyspark's TorchDistributor and torchrun.

Cold: a new session in a new process, hence no forkserver and no Python worker yet; the session's
own start is not counted. Warm: the second and later runs of one session.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from harness import Row, Samples, fresh, machine, report, serve, warm

EXPECTED = 3.0  # rank + 1, over two ranks


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


# --- the subjects: each prepares, and returns what is timed ---------------------------------------

OURS, PYSPARK = "sparkdist", "pyspark.ml.torch.distributor"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "all_reduce.py"]


def distributor(module: str, local_mode: bool) -> Callable[[], None]:
    from pyspark.sql import SparkSession

    # Spark would look for a python3 on PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    cls = import_module(module).TorchDistributor

    def run() -> None:
        value = cls(2, local_mode=local_mode, use_gpu=False).run(all_reduce)
        assert value == EXPECTED, value

    return run


def torchrun() -> Callable[[], None]:
    # A script cannot return a value: it asserts.
    source = f"{inspect.getsource(all_reduce)}\n\nassert all_reduce() == {EXPECTED}\n"

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "all_reduce.py").write_text(source)
            subprocess.run([sys.executable, *TORCHRUN], cwd=folder, check=True)

    return run


def call(module: str, local_mode: bool) -> str:
    return f"{module}.TorchDistributor(2, local_mode={local_mode}, use_gpu=False).run(all_reduce)"


SUBJECTS: dict[str, tuple[str, Callable[[], Callable[[], None]]]] = {
    "torchrun": (" ".join(["python", *TORCHRUN]), torchrun),
} | {
    name: (call(module, local_mode), partial(distributor, module, local_mode))
    for name, module, local_mode in (
        ("sparkdist", OURS, False),
        ("pyspark", PYSPARK, False),
        ("sparkdist local_mode", OURS, True),
        ("pyspark local_mode", PYSPARK, True),
    )
}


# --- the comparison -------------------------------------------------------------------------------


def compare(repeats: int) -> list[Row]:
    commands = {name: [sys.executable, __file__, "--worker", name] for name in SUBJECTS}
    cold = fresh({name: commands[name] for name in ("sparkdist", "pyspark", "torchrun")}, repeats)
    again = warm("sparkdist", "pyspark", commands, repeats)
    local = warm("sparkdist local_mode", "pyspark local_mode", commands, repeats)
    return [
        row("cold, local[2]", cold, "sparkdist", "pyspark", 0.35),
        row("cold, local[2]", cold, "sparkdist", "torchrun", 0.8),
        row("warm, local[2]", again, "sparkdist", "pyspark", 0.05),
        row("warm, local_mode=True", local, "sparkdist local_mode", "pyspark local_mode", 0.10),
    ]


def row(case: str, samples: Samples, ours: str, peer: str, limit: float) -> Row:
    return Row(case=case, peer=peer, ours=samples[ours], theirs=samples[peer], limit=limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; the table shows medians")
    parser.add_argument("--quick", action="store_const", const=1, dest="repeats", help="one run of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--worker", choices=list(SUBJECTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _, prepare = SUBJECTS[args.worker]
        serve(prepare())
        return 0
    facts = machine(["sparkdist", "pyspark", "torch"])
    print("# Launch\n")
    print("\n".join(f"- {name}: {text}" for name, text in facts.items()))
    print("\n".join(f"- {name}: `{text}`" for name, (text, _) in SUBJECTS.items()), end="\n\n", flush=True)
    return report(facts, compare(args.repeats), args.json)


if __name__ == "__main__":
    sys.exit(main())
