"""Distributed deep-learning training on Apache Spark: one call, real results or the real error.

```python
from sparkdist import TorchDistributor

value = TorchDistributor(num_processes=8).run(train_fn, 1e-3, epochs=3)
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdist import testing as testing
    from sparkdist.distributors.horovod_runner import HorovodRunner
    from sparkdist.distributors.torch import TorchDistributor
    from sparkdist.errors import (
        ConfigurationError,
        Failure,
        PreflightError,
        ResultError,
        SparkdistError,
        TrainingFailed,
        TrainingTimeout,
    )
    from sparkdist.launcher import Launcher
    from sparkdist.rank_context import RankContext, context, report
    from sparkdist.results import Attempt, RankResult, Report, Results, Timings
    from sparkdist.settings import Settings

__version__ = "0.1.0"

# Loaded when first asked for: executors import parts of this package and never the driver's.
_HOMES = {
    "distributors.horovod_runner": ("HorovodRunner",),
    "distributors.torch": ("TorchDistributor",),
    "errors": (
        "ConfigurationError",
        "Failure",
        "PreflightError",
        "ResultError",
        "SparkdistError",
        "TrainingFailed",
        "TrainingTimeout",
    ),
    "launcher": ("Launcher",),
    "rank_context": ("RankContext", "context", "report"),
    "results": ("Attempt", "RankResult", "Report", "Results", "Timings"),
    "settings": ("Settings",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Attempt",
    "ConfigurationError",
    "Failure",
    "HorovodRunner",
    "Launcher",
    "PreflightError",
    "RankContext",
    "RankResult",
    "Report",
    "ResultError",
    "Results",
    "Settings",
    "SparkdistError",
    "Timings",
    "TorchDistributor",
    "TrainingFailed",
    "TrainingTimeout",
    "context",
    "report",
]


def __getattr__(name: str) -> object:
    if name == "testing":  # the one module that users name
        return import_module("sparkdist.testing")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
