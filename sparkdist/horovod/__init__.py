"""Real Horovod on Spark, behind the names of `horovod.spark` and `sparkdl`.

```python
from sparkdist.horovod import HorovodRunner, run

results = run(train, args=(1e-3,), num_proc=8)  # every rank's value
value = HorovodRunner(np=8).run(train, lr=1e-3)  # rank 0's
```

Nothing here needs Horovod on the driver; ranks do. `sparkdist horovod build` installs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdist.distributors.horovod import run, run_elastic
    from sparkdist.distributors.horovod_runner import HorovodRunner
    from sparkdist.horovod.callback import LogCallback
    from sparkdist.rank_context import log_to_driver

# Loaded when first asked for: ranks use some of these, and never need what is the driver's.
_HOME_OF = {
    "HorovodRunner": "distributors.horovod_runner",
    "LogCallback": "horovod.callback",
    "log_to_driver": "rank_context",
    "run": "distributors.horovod",
    "run_elastic": "distributors.horovod",
}

__all__ = ["HorovodRunner", "LogCallback", "log_to_driver", "run", "run_elastic"]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"sparkdist.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
