"""What the driver knows of a running attempt, written by many threads and waited on by one."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import itemgetter

from sparkdist.executor.leader import Row
from sparkdist.results import Report

_REPORTS = 10_000  # that are kept of each rank


@dataclass(frozen=True)
class Silence:
    """That a rank does nothing.

    Attributes:
        since: From when on (time.monotonic()).
        state: What its node's kernel says of its process.
    """

    since: float
    state: str


@dataclass
class Board:
    """The news of one attempt.

    Attributes:
        nodes: When each node's agent said hello (time.monotonic()).
        gathered: Whether nodes found each other by Spark's means because one cannot reach the driver.
        entered: When each rank entered the user's code.
        returned: When each rank returned from it.
        failed: Ranks in the order in which they failed.
        failed_at: When the first of them did (time.monotonic()), or 0.
        lost: When agents were lost, by node: they took no leave (time.monotonic()).
        executor_lost: Whether one of the executors is gone.
        cancelled: Whether we had the gang's job cancelled.
        reported: When each rank's last report came.
        silent: Ranks that have not done anything for `stall_timeout`.
        outcomes: Pickled outcomes that came over the control channel.
        shortage: Why an outcome that came there could not be kept, or "".
        stacks: Stacks by rank, as far as they came.
        asleep: Silent ranks of these that slept until they were asked for theirs.
        stack_reports: How many nodes have sent theirs.
        rows: The gang's rows, once they are there.
    """

    nodes: dict[int, float] = field(default_factory=dict)
    gathered: bool = False
    entered: dict[int, float] = field(default_factory=dict)
    returned: dict[int, float] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    failed_at: float = 0.0
    lost: dict[int, float] = field(default_factory=dict)
    executor_lost: bool = False
    cancelled: bool = False
    reported: dict[int, float] = field(default_factory=dict)
    silent: dict[int, Silence] = field(default_factory=dict)
    outcomes: dict[int, bytearray] = field(default_factory=dict)
    shortage: str = ""
    stacks: dict[int, str] = field(default_factory=dict)
    asleep: set[int] = field(default_factory=set)
    stack_reports: int = 0
    rows: Future[list[Row]] = field(default_factory=Future)
    _reports: dict[int, deque[tuple[int, Report]]] = field(default_factory=dict)
    _arrivals: itertools.count[int] = field(default_factory=itertools.count)
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

    @property
    def has_rows(self) -> bool:
        """Whether the gang's rows are there, and not its job's error instead."""
        return self.rows.done() and self.rows.exception() is None

    def add_failed(self, rank: int) -> None:
        """Notes that a rank has failed."""
        self.failed.append(rank)
        self.failed_at = self.failed_at or time.monotonic()

    def add_gathered(self, nodes: int) -> None:
        """Notes that so many nodes have found each other by Spark's means."""
        self.gathered = len(self.nodes) < nodes

    def forget_stacks(self) -> None:
        """Notes that the stacks will be asked for anew."""
        self.stacks, self.asleep, self.stack_reports = {}, set(), 0

    def add_stacks(self, stacks: dict[int, str], asleep: Iterable[int]) -> None:
        """Notes one node's stacks."""
        self.stacks.update(stacks)
        self.asleep.update(asleep)
        self.stack_reports += 1

    def add_reports(self, rank: int, reports: list[Report]) -> None:
        """Notes reports of one rank."""
        kept = self._reports.setdefault(rank, deque(maxlen=_REPORTS))
        kept.extend((next(self._arrivals), report) for report in reports)
        self.reported[rank] = time.monotonic()

    @property
    def reports(self) -> list[Report]:
        """The ranks' reports in the order of their arrival, of each rank the last 10,000."""
        with self._changed:
            return [report for _, report in heapq.merge(*self._reports.values(), key=itemgetter(0))]

    @property
    def last_report(self) -> Report | None:
        """The last report of the lowest rank that makes any."""
        with self._changed:
            return self._reports[min(self._reports)][-1][1] if self._reports else None
