"""The exceptions of sparkdist.

```
SparkdistError
├── ConfigurationError (ValueError)    a setting or an input is wrong; raised before any job starts
├── PreflightError (RuntimeError)      the session, the cluster or an executor cannot run this
├── TrainingFailed (RuntimeError)      ranks failed; `failures` says what happened to each
├── TrainingTimeout (TimeoutError)     `timeout` or `start_timeout` passed; `stacks` says where ranks stood
└── ResultError (RuntimeError)         a rank's return value could not be brought to the driver
```

Every one carries its facts as attributes, pickles, and says in its message what to do next.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sparkdist.results import Attempt, Report

_SHOWN = 16  # of ranks or attempts that a message lists

FailureKind = Literal["exception", "exit", "signal", "lost", "stalled"]


class SparkdistError(Exception):
    """Base of every exception that sparkdist raises by itself.

    Attributes:
        attempts: The run's attempts, each of which ended in a failure; empty where there was none.
        metrics: What ranks had reported until then; see `Results.metrics`.
    """

    attempts: tuple[Attempt, ...] = ()
    metrics: tuple[Report, ...] = ()


class ConfigurationError(SparkdistError, ValueError):
    """A setting or an input is wrong. Raised on the driver before any job starts."""


class PreflightError(SparkdistError, RuntimeError):
    """The session, the cluster or an executor cannot run what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What happened to one rank that failed.

    Attributes:
        rank: The rank.
        kind: `"exception"`, `"exit"` (ended by itself without a result), `"signal"`, or `"lost"`
            (its agent or executor is gone), or `"stalled"` (it did nothing for `stall_timeout`).
        order: Place in time among the failures of the attempt; 0 is the root.
        type_name: Qualified name of the exception's type, or "".
        bases: Qualified names of the types that this one derives from, itself first.
        message: The exception's text, or the message of `sys.exit("...")`.
        traceback: The formatted traceback, or "".
        exception: The exception itself where it pickled on the rank and unpickled here.
        exit_code: The exit code for kind `"exit"`.
        signal: The signal's name for kind `"signal"`, such as `"SIGKILL"`.
        preempted: Whether the rank was taken away from outside: with its executor, or by a SIGTERM.
        hint: Advice, such as an out-of-memory note; may be "".
        log_tail: The rank's last lines of output, oldest first (at most 100).
    """

    rank: int
    kind: FailureKind
    order: int = 0
    type_name: str = ""
    bases: tuple[str, ...] = ()
    message: str = ""
    traceback: str = ""
    exception: BaseException | None = None
    exit_code: int | None = None
    signal: str | None = None
    preempted: bool = False
    hint: str = ""
    log_tail: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int | None:
        """The exit code, or of a signal its negative number, as subprocess has it; None for other kinds."""
        if self.signal is not None:
            return -int(getattr(signal, self.signal, 0) or self.signal.removeprefix("signal "))
        return self.exit_code

    def __str__(self) -> str:
        if self.kind == "exception":
            text = f"rank {self.rank} raised {self.type_name}: {self.message}"
        elif self.kind == "exit":
            text = f"rank {self.rank} exited with code {self.exit_code} instead of returning"
            text += f": {self.message}" if self.message else ""
        elif self.kind == "signal":
            text = f"rank {self.rank} was killed by {self.signal}"
            text += f": {self.message}" if self.message else ""
        elif self.kind == "stalled":
            text = f"rank {self.rank} stalled: {self.message}"
        else:
            text = f"rank {self.rank} was lost: {self.message}"
        return f"{text} ({self.hint})" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        # An exception that came unpickled from a rank need not survive another trip.
        return _restore_failure, (replace(self, exception=None).__dict__,)


def _restore_failure(fields: dict[str, object]) -> Failure:
    return Failure(**fields)  # type: ignore[arg-type]


class TrainingFailed(SparkdistError, RuntimeError):
    """One or more ranks failed; the others were stopped.

    Attributes:
        failures: What happened, by rank; ranks that were stopped because of it are not in it.
        root: The failure that came first; its exception, where there is one, is `__cause__`.
        run_id: The run.
        stacks: Of ranks that stalled and of their peers, the Python stack by rank.
    """

    def __init__(
        self,
        failures: Mapping[int, Failure],
        run_id: str = "",
        stacks: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(failures, run_id, dict(stacks))
        self.failures = dict(failures)
        self.run_id = run_id
        self.stacks = dict(stacks)
        self.root = min(self.failures.values(), key=lambda failure: failure.order)
        self.__cause__ = self.root.exception

    def __str__(self) -> str:
        parts = [f"{self.root} (run {self.run_id})"]
        if self.root.traceback:
            parts.append(self.root.traceback.rstrip())
        elif self.root.log_tail:
            parts.append("Its last output was:\n" + "\n".join(self.root.log_tail[-20:]))
        others = sorted(f.rank for f in self.failures.values() if f is not self.root)
        if others:
            parts.append(f"Failed after it: rank {listed(others)} (see .failures).")
        parts += _listing(self.stacks)
        if len(self.attempts) > 1:
            before = self.attempts[-_SHOWN - 1 : -1]
            parts.append(f"That was attempt {len(self.attempts)}. Before it (see .attempts):")
            parts += [f"  {attempt.number + 1}: {attempt.cause}" for attempt in before]
        return "\n".join(parts)


class TrainingTimeout(SparkdistError, TimeoutError):
    """The run passed `timeout`, or a rank did not enter the function within `start_timeout`.

    Attributes:
        stacks: The Python stack of every live rank, by rank, as `faulthandler` prints it, or
            what /proc says of a rank that could not print one.
        setting: `"timeout"` or `"start_timeout"`.
        seconds: Its value, in seconds.
        missing: The ranks that had not entered the function.
        phase: What the run was doing, in words.
    """

    def __init__(
        self,
        setting: str,
        seconds: float,
        stacks: Mapping[int, str],
        missing: tuple[int, ...] = (),
        phase: str = "",
    ) -> None:
        super().__init__(setting, seconds, stacks, missing, phase)
        self.setting = setting
        self.seconds = seconds
        self.stacks = dict(stacks)
        self.missing = missing
        self.phase = phase

    def __str__(self) -> str:
        if self.setting == "start_timeout":
            ranks = listed(self.missing)
            head = f"rank {ranks} had not entered the function after {self.seconds:g} s ({self.phase})"
        else:
            head = f"the run did not end within {self.seconds:g} s ({self.phase})"
        parts = [f"{head}; all ranks were stopped. Raise {self.setting}= if it needs longer."]
        return "\n".join(parts + _listing(self.stacks))


def listed(ranks: Sequence[int]) -> str:
    """Returns ranks for a message: the first ones where there are many."""
    return ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")


def _listing(stacks: Mapping[int, str]) -> list[str]:
    return [f"--- rank {rank}:\n{stack.rstrip()}" for rank, stack in sorted(stacks.items())]


class ResultError(SparkdistError, RuntimeError):
    """A rank's return value could not be brought to the driver.

    Attributes:
        rank: The rank.
        type_name: The value's type.
        reason: What is wrong with it, as the end of a sentence that begins with it.
    """

    def __init__(self, rank: int, type_name: str, reason: str) -> None:
        super().__init__(rank, type_name, reason)
        self.rank = rank
        self.type_name = type_name
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.rank} returned a {self.type_name} that {self.reason}"
