"""What the driver knows of a running attempt, written by many threads and waited on by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from sparkdist.executor.leader import Row

T = TypeVar("T")


@dataclass
class Board:
    """The news of one attempt.

    Attributes:
        nodes: When each node's agent said hello (time.monotonic()).
        gathered: Whether nodes found each other by Spark's means because one cannot reach the driver.
        entered: When each rank entered the user's code.
        returned: When each rank returned from it.
        failed: Ranks in the order in which they failed.
        outcomes: Pickled outcomes that came over the control channel.
        shortage: Why an outcome that came there could not be kept, or "".
        stacks: Stacks by rank, as far as they came.
        stack_reports: How many nodes have sent theirs.
        rows: The gang's rows, once they are there.
    """

    nodes: dict[int, float] = field(default_factory=dict)
    gathered: bool = False
    entered: dict[int, float] = field(default_factory=dict)
    returned: dict[int, float] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    outcomes: dict[int, bytearray] = field(default_factory=dict)
    shortage: str = ""
    stacks: dict[int, str] = field(default_factory=dict)
    stack_reports: int = 0
    rows: Future[list[Row]] = field(default_factory=Future)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, change: Callable[[Board], object]) -> None:
        """Applies a change and wakes the waiter."""
        with self._changed:
            change(self)
            self._changed.notify_all()

    def wait(self, reached: Callable[[Board], bool], timeout: float | None) -> bool:
        """Waits until `reached` holds; returns False when `timeout` seconds passed before."""
        with self._changed:
            return self._changed.wait_for(lambda: reached(self), timeout)

    def add_gathered(self, nodes: int) -> None:
        """Notes that so many nodes have found each other by Spark's means."""
        self.gathered = len(self.nodes) < nodes

    def add_stacks(self, stacks: dict[int, str]) -> None:
        """Notes one node's stacks."""
        self.stacks.update(stacks)
        self.stack_reports += 1
