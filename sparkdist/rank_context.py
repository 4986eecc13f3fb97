"""What a training function may ask about the rank it runs in, and tell of its progress."""

from __future__ import annotations

import itertools
import math
import operator
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

_MESSAGE = 4000  # characters of one for the driver; HorovodRunner's limit


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where a rank stands in its gang.

    Attributes:
        rank: 0 to world_size - 1, over the whole gang.
        world_size: Number of ranks in the gang.
        local_rank: 0 to local_world_size - 1, on this node.
        local_world_size: Number of ranks on this node.
        node_rank: Index of this node (one executor, or the driver).
        attempt: 0 for the first try of the run.
        run_id: The run's identifier.
        kept_folder: See `kept`.
        ship_folder: Where things sent with `ship=` are, or ""; see `shipped`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    attempt: int
    run_id: str
    ship_folder: str = ""
    kept_folder: str = ""

    @property
    def kept(self) -> Path:
        """A folder of this run on this node, with what earlier attempts left in it.

        Ranks of a later attempt find it if their executor is still the same; on another it is
        empty, as at the first attempt. It is gone when the run has ended well, and some time
        after it has failed for good.
        """
        return Path(self.kept_folder)

    def shipped(self, name: str) -> Path:
        """Returns the path on this node of something sent with `ship=`.

        Raises:
            FileNotFoundError: Nothing of that name was shipped.
        """
        path = Path(self.ship_folder, name)
        if not self.ship_folder or not path.exists():
            raise FileNotFoundError(f"nothing named {name!r} was sent with ship=")
        return path


_current: RankContext | None = None
_process = 0  # the rank's own
_tell: Callable[[dict[str, Any]], None] | None = None
_let_print: Callable[[], None] | None = None
_numbers = itertools.count(1)

reports_made = 0
after_report: list[Callable[[int], None]] = []  # each is called with how many reports there have been


def context() -> RankContext:
    """Returns this rank's context.

    Raises:
        RuntimeError: This process is not a rank of a sparkdist run.
    """
    if _current is None:
        raise RuntimeError("this process is not a rank: context() works in a function started by sparkdist")
    return _current


def report(metrics: Mapping[str, Any], step: SupportsIndex | None = None) -> None:
    """Tells the driver how far this rank is: in its status line, and in `Results.metrics`.

    It costs 15 to 50 microseconds, more for a tensor that has to come from a GPU. Any thread may
    call it. A rank that reports is making progress: see `max_preemptions` in `Settings`.

    Args:
        metrics: Numbers by name, such as `{"loss": loss}`: Python's, numpy's, or tensors of one element.
        step: The step they belong to, 0 or more, or None.

    Raises:
        RuntimeError: This process is not a rank of a sparkdist run, but perhaps a child of one.
        TypeError: A metric or the step is no number.
        ValueError: The step is negative.
    """
    global reports_made
    current, tell = _own("report")
    if not isinstance(metrics, Mapping):
        raise TypeError(f"report() takes metrics by name, such as {{'loss': 0.5}}, not {metrics!r:.200}")
    data = {
        "attempt": current.attempt,
        "step": None if step is None else _step(step),
        "metrics": {_name(name): _number(name, value) for name, value in metrics.items()},
        "time": time.time(),
    }
    tell({"kind": "report", "data": data})
    reports_made = made = next(_numbers)
    for hook in after_report:
        hook(made)


def log_to_driver(message: str) -> None:
    """Prints a message on the driver behind this rank's number, whatever else of it is shown (`logs`).

    It is shown after the lines that this rank printed before, and before those that it prints later.
    Any thread may call it.

    Args:
        message: Up to 4000 characters; what is longer is cut there.

    Raises:
        RuntimeError: This process is not a rank of a sparkdist run, but perhaps a child of one.
        TypeError: The message is not a string.
    """
    _, tell = _own("log_to_driver")
    if not isinstance(message, str):
        raise TypeError(f"log_to_driver() takes a string, not {message!r:.200}; str() makes one of anything")
    if _let_print:
        _let_print()
    tell({"kind": "said", "data": message[:_MESSAGE]})


def _own(caller: str) -> tuple[RankContext, Callable[[dict[str, Any]], None]]:
    """Returns the context of the rank that this process is, and how to tell its agent something."""
    if _current is None or _tell is None:
        raise RuntimeError(f"this process is not a rank: {caller}() works in a function started by sparkdist")
    if os.getpid() != _process:
        raise RuntimeError(
            f"this process is a child of rank {_current.rank}, such as a DataLoader worker: call {caller}() "
            "in the rank's own process, where the training loop is"
        )
    return _current, _tell


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"report(): the name of a metric must be a string, not {name!r:.200}")
    return name


def _number(name: str, value: Any) -> float:
    try:
        number = value
        if not isinstance(value, (float, int)):
            if math.prod(getattr(value, "shape", ())) != 1:
                raise TypeError
            # First item(): a tensor that needs a gradient warns of float().
            number = value.item() if hasattr(value, "item") else value
        if not hasattr(number, "__float__"):  # text, which float() would read
            raise TypeError
        return float(number)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"report(): the metric {name!r} must be one number, not {value!r:.200}") from None


def _step(step: Any) -> int:
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"report(): step must be an integer or None, not {step!r:.200}") from None
    if number < 0:
        raise ValueError(f"report(): step must be at least 0, not {number}")
    return number


def enter(
    context: RankContext, tell: Callable[[dict[str, Any]], None], let_print: Callable[[], None]
) -> None:
    """Makes `context` this process's; called once by the worker before the user's code.

    Args:
        context: Where the rank stands.
        tell: Takes one frame for the rank's agent.
        let_print: Waits until the agent has what the rank has printed.
    """
    global _current, _process, _tell, _let_print
    _current, _process, _tell, _let_print = context, os.getpid(), tell, let_print
