"""Waiting for an attempt: for its rows, its limits of time, and its end."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from sparkdist import wire
from sparkdist.driver.board import Board
from sparkdist.driver.control import ControlChannel
from sparkdist.driver.growth import GangGrows, Growth
from sparkdist.driver.session import message_of
from sparkdist.driver.stall import Stalls, with_last_lines
from sparkdist.errors import TrainingFailed, TrainingTimeout
from sparkdist.executor.last_words import rows_in
from sparkdist.executor.leader import LINES, Row
from sparkdist.executor.order import Order
from sparkdist.settings import Settings

_ROWS_TIME = 2.0  # s that rows get to arrive after the ranks have been ended
_FAILED_TIME = 60.0  # s that they get after a failure: they say what it was
_CANCEL_TIME = 10.0  # s; Spark needs 2 to 4 to kill a Python worker
_UNREACHABLE = (
    "executors cannot connect to the driver at {address}, or not all the time: the run goes on without live "
    "logs (they come with the result), start_timeout, stall_timeout and stacks of a timeout. Set "
    "spark.driver.host to an address that executors reach, and ports= to ports that a firewall lets through."
)


class Gang(Protocol):
    """Where ranks run: a barrier job, or the driver."""

    def run(self) -> list[Row]:
        """Runs the gang to its end."""

    def cancel(self) -> None:
        """Ends it without its agents' help."""

    def is_unheard(self) -> bool:
        """Says whether its agents may be at work though none of them has reached the driver."""

    def lost_executor(self) -> bool:
        """Says whether an executor that it started on is gone, as far as that can be known."""

    def waiting_for(self) -> str:
        """Says what it waits for while no agent has reported."""

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Returns the thread to run it in."""


class Watch:
    """The waiting side of an attempt.

    Args:
        order: The attempt.
        settings: Its limits.
        board: What is known of it.
        channel: How its agents are reached.
        gang: Where its ranks run.
        deadline: When the run has to be over (time.monotonic()), or None.
        growth: Whether the gang is to be ended to go on with more ranks; None for never.
    """

    def __init__(
        self,
        order: Order,
        settings: Settings,
        board: Board,
        channel: ControlChannel,
        gang: Gang,
        deadline: float | None,
        growth: Growth | None,
    ) -> None:
        self._order = order
        self._settings = settings
        self._board = board
        self._channel = channel
        self._gang = gang
        self._growth = growth
        self._stalls = Stalls(order, board, channel)
        self._warned = False
        self._limits = {"start_timeout": time.monotonic() + settings.start_timeout}
        if deadline is not None:
            self._limits["timeout"] = deadline
        self._thread = gang.thread(self._run)

    def start(self) -> None:
        """Starts the gang in a thread of its own: Ctrl-C reaches the one that waits."""
        try:
            self._thread.start()
        except RuntimeError as error:  # there may be no more threads
            self._board.rows.set_exception(error)

    def _run(self) -> None:
        try:
            rows = self._gang.run()
        except BaseException as error:
            reason, last_words = error, None
            with suppress(Exception):  # a JVM that has just died cannot say what it said
                last_words = rows_in(message_of(error))
            if last_words is None:
                self._board.note(lambda board: board.rows.set_exception(reason))
                return
            rows = last_words
        self._board.note(lambda board: board.rows.set_result(rows))

    def wait(self) -> None:
        """Waits for the gang's rows.

        Raises:
            TrainingTimeout: `timeout` or `start_timeout` passed.
            GangGrows: There are slots for more ranks.
            TrainingFailed: Ranks did nothing for `stall_timeout`; all have been ended.
        """
        size = self._order.world_size
        self._reach(lambda b: b.rows.done() or bool(b.failed) or len(b.entered) == size)
        del self._limits["start_timeout"]
        self._train()
        if self._board.failed:
            self.end(wire.GRACE, _FAILED_TIME)  # its agents do so too; one that cannot be reached does not
        self._reach(lambda b: b.rows.done())
        if self._board.lost:
            self._board.executor_lost = self._gang.lost_executor()

    def _train(self) -> None:
        """Waits until the ranks are done, or one has failed, or stalls, or the gang is to grow."""
        pause = self._growth.PAUSE if self._growth else threading.TIMEOUT_MAX
        while True:
            happened = self._reach(lambda b: b.rows.done() or bool(b.failed) or self._stalls.is_due(), pause)
            if self._board.rows.done() or self._board.failed:
                return
            failures = self._stalls.find() if happened else None
            if failures:
                stacks = dict(self._board.stacks)
                self.end(wire.GRACE)
                raise TrainingFailed(with_last_lines(failures, self.rows()), self._order.run_id, stacks)
            if self._growth and not self._board.returned:
                self._grow(self._growth)

    def _grow(self, growth: Growth) -> None:
        try:
            growth.look()
        except GangGrows:
            self.end(wire.GRACE)
            if len(self._board.returned) < self._order.world_size:  # else it was done just then
                raise

    def _reach(self, reached: Callable[[Board], bool], pause: float = threading.TIMEOUT_MAX) -> bool:
        """Waits until something holds; returns False when `pause` seconds passed before."""
        name, moment = min(self._limits.items(), key=lambda limit: limit[1], default=("", math.inf))
        left = max(0.0, moment - time.monotonic())
        if self._board.wait(reached, min(left, pause)):
            return True
        if pause < left:
            return False
        if name == "start_timeout" and self._is_unheard():
            self._warn()
            return False
        raise self._timeout(name)

    def _is_unheard(self) -> bool:
        return self._board.gathered or (not self._board.nodes and self._gang.is_unheard())

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(_UNREACHABLE.format(address=self._order.control), stacklevel=2)

    def rows(self) -> list[Row]:
        """Returns the gang's rows, and says if they show that executors could not reach the driver."""
        rows = self._board.rows.result() if self._board.has_rows else []
        # A killed agent says nothing about the driver.
        told = [header for header, _ in rows if header["kind"] != "lost"]
        if any(header.get("unheard") or header["kind"] in LINES for header in told):
            self._warn()
        return rows

    def _timeout(self, setting: str) -> TrainingTimeout:
        stacks = self._channel.ask_stacks()
        missing = tuple(r for r in range(self._order.world_size) if r not in self._board.entered)
        return TrainingTimeout(setting, getattr(self._settings, setting), stacks, missing, self._phase())

    def _phase(self) -> str:
        if not self._board.nodes:
            return self._gang.waiting_for()
        entered, size = len(self._board.entered), self._order.world_size
        return "training" if entered == size else f"starting: {entered} of {size} ranks had entered"

    def end(self, grace: float, rows_time: float = _ROWS_TIME) -> None:
        """Ends the gang: by its agents, or by Spark's cancel where they do not answer.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.
            rows_time: Seconds that rows get to arrive after that.
        """
        try:
            self._channel.stop_ranks(grace)
            patience = grace + rows_time if self._board.nodes else 0.0
            if not self._board.wait(lambda b: b.rows.done(), patience):
                self._cancel()
                self._board.wait(lambda b: b.rows.done(), _CANCEL_TIME)
        except KeyboardInterrupt:  # asked for twice: at once
            self._channel.stop_ranks(0.0)
            self._cancel()
            raise

    def _cancel(self) -> None:
        self._board.cancelled = True
        with suppress(Exception):  # what ended the gang is to be told, not that Spark is gone
            self._gang.cancel()
