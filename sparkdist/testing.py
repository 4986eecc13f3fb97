"""For users who test their own resume: a rank fails on purpose, at a step that is chosen.

```python
with sparkdist.testing.fail(rank=1, attempt=0, after_steps=10, how="kill"):
    results = TorchDistributor(num_processes=2, max_restarts=1).launch(train)
assert len(results.attempts) == 2
```
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from sparkdist import rank_context, validation
from sparkdist.errors import ConfigurationError

How = Literal["raise", "kill", "exit", "stop"]


class InjectedFault(RuntimeError):
    """What a rank raises that was told to fail by raising."""


def fail(
    rank: int, attempt: int = 0, after_steps: int = 0, how: How = "raise"
) -> AbstractContextManager[None]:
    """Has a rank fail once it has called `sparkdist.report` so many times.

    On the driver this holds for the next launch of the calling thread, whatever becomes of that
    launch; several calls add up. As in `with fail(...):` it holds for every launch inside, and for
    none after. In a rank, called by the user's own code, it holds for that rank and attempt if they
    are the ones that are named; reports that were made before count.

    Args:
        rank: Who fails.
        attempt: In which attempt of the run, 0 for the first. torchrun's own restarts
            (`torchrun_args`) are none of these: there it fails in each.
        after_steps: How many reports it makes before; it fails when the last of them has been sent.
            0: as it enters the function.
        how: `"raise"`: `report` raises `InjectedFault`. `"kill"`: SIGKILL. `"exit"`: `os._exit(1)`,
            which cleans nothing up (sys.exit would raise, as `"raise"` does). `"stop"`: SIGSTOP, so
            that the rank lives and does nothing.

    Raises:
        ConfigurationError: An argument is not valid; that the gang has no such rank is for the
            launch to say.
    """
    validation.check_choice("how", how, ("raise", "kill", "exit", "stop"))
    fault = Fault(
        rank=validation.integer("rank", rank, at_least=0),
        attempt=validation.integer("attempt", attempt, at_least=0),
        after_steps=validation.integer("after_steps", after_steps, at_least=0),
        how=how,
    )
    try:
        here = rank_context.context()
    except RuntimeError:
        return _ForLaunches(fault, _of_this_thread())
    is_meant = (here.rank, here.attempt) == (fault.rank, fault.attempt)
    return _InRank(arm(fault) if is_meant else None)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure that is to come, as data; see `fail` for its parts."""

    rank: int
    attempt: int
    after_steps: int
    how: How


# --- on the driver ------------------------------------------------------------------------------

_local = threading.local()


class _ForLaunches(AbstractContextManager[None]):
    """A fault that waits for launches: for one, or for those inside a `with` statement."""

    def __init__(self, fault: Fault, waiting: list[_ForLaunches]) -> None:
        self.fault = fault
        self.is_lasting = False
        self._waiting = waiting
        waiting.append(self)

    def __enter__(self) -> None:
        self.is_lasting = True
        if self not in self._waiting:
            self._waiting.append(self)

    def __exit__(self, *exc: object) -> None:
        self.is_lasting = False
        if self in self._waiting:
            self._waiting.remove(self)


def _of_this_thread() -> list[_ForLaunches]:
    waiting: list[_ForLaunches] = _local.__dict__.setdefault("waiting", [])
    return waiting


def take(world_size: int) -> tuple[Fault, ...]:
    """Returns the faults that wait for the launch that begins, and forgets those that are for it alone.

    Args:
        world_size: Number of ranks.

    Raises:
        ConfigurationError: One is for a rank that there will not be.
    """
    waiting = _of_this_thread()
    faults = tuple(each.fault for each in waiting)
    waiting[:] = [each for each in waiting if each.is_lasting]
    for fault in faults:
        if fault.rank >= world_size:
            raise ConfigurationError(
                f"sparkdist.testing.fail: there is no rank={fault.rank} in a gang of {world_size}; "
                f"name one from 0 to {world_size - 1}"
            )
    return faults


# --- in a rank ----------------------------------------------------------------------------------


class _InRank(AbstractContextManager[None]):
    """A fault in the rank itself, or nothing if it is another's."""

    def __init__(self, hook: Callable[[int], None] | None) -> None:
        self._hook = hook

    def __exit__(self, *exc: object) -> None:
        if self._hook in rank_context.after_report:
            rank_context.after_report.remove(self._hook)


def arm(fault: Fault) -> Callable[[int], None]:
    """Has this process, the rank that is meant, fail; at once if it has made as many reports.

    Returns:
        What `rank_context.after_report` now holds.
    """
    hook = partial(_count, fault)
    rank_context.after_report.append(hook)
    if rank_context.reports_made >= fault.after_steps:
        _fail(fault)
    return hook


def _count(fault: Fault, reports: int) -> None:
    if reports == fault.after_steps:
        _fail(fault)


def _fail(fault: Fault) -> None:
    if fault.how == "raise":
        raise InjectedFault(
            f"rank {fault.rank} was to fail after {fault.after_steps} steps of attempt {fault.attempt}"
        )
    if fault.how == "exit":
        os._exit(1)
    # To this thread, so that it does not run on until another one has taken it.
    signal.raise_signal(signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)
