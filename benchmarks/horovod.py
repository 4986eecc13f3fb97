"""What real Horovod costs to start: 2 ranks, one allreduce, against horovod.spark.run.

Cold: a new session in a new process; the session's own start is not counted. Warm: the second and
later runs of one session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

# `import horovod` is to find the package, and not this file, which Python would look for first.
sys.path.append(sys.path.pop(0))

from harness import Commands, Row, Subject, fresh, main, warm
from launch import session

OURS, PEER = "sparkdist.horovod", "horovod.spark"
MASTER = "local[2]"


def all_reduce() -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    return float(total)


def runner(module: str) -> Callable[[], None]:
    session(MASTER)
    run = import_module(module).run

    def once() -> None:
        values = run(all_reduce, num_proc=2)
        assert values == [3.0, 3.0], values

    return once


SUBJECTS = {
    module: Subject(f"{module}.run(all_reduce, num_proc=2) on {MASTER}", partial(runner, module))
    for module in (OURS, PEER)
}


def compare(commands: Commands, repeats: int) -> list[Row]:
    cold, later = fresh(commands, repeats), warm(OURS, PEER, commands, repeats)
    return [
        Row.of(f"cold, {MASTER}", cold, OURS, PEER, 0.35),
        Row.of(f"warm, {MASTER}", later, OURS, PEER, 0.10),
    ]


if __name__ == "__main__":
    sys.exit(main("Horovod", __doc__, SUBJECTS, compare))
