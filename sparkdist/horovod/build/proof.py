"""Proves an installed Horovod: two ranks add their numbers up, over gloo."""

from __future__ import annotations

from typing import Any

from sparkdist.errors import SparkdistError
from sparkdist.horovod.build.diagnosis import BuildError, diagnose
from sparkdist.launcher import Launcher

_LIMIT = 120.0  # s


def prove(framework: str) -> None:
    """Runs an allreduce of two ranks on this machine.

    Raises:
        BuildError: It failed, or the sum is wrong.
    """
    try:
        total = Launcher("horovod", num_processes=2, local_mode=True, timeout=_LIMIT).run(_add_up, framework)
    except SparkdistError as error:
        known = diagnose(str(error))
        raise BuildError(f"the allreduce of two ranks failed: {known.cause if known else error}") from error
    if total != 3.0:
        raise BuildError(f"the allreduce of two ranks with 1.0 and 2.0 made {total}, not 3.0")


def _add_up(framework: str) -> float:
    import importlib

    hvd: Any = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    return float(hvd.allreduce(_number(framework, hvd.rank() + 1.0), op=hvd.Sum))


def _number(framework: str, value: float) -> Any:
    import importlib

    module: Any = importlib.import_module(framework)
    make = {"torch": "tensor", "tensorflow": "constant"}.get(framework)
    return getattr(module, make)([value]) if make else module.nd.array([value])
