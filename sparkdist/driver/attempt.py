"""One attempt: the gang is started, watched against the clock, and ended, whatever happens."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from sparkdist import wire
from sparkdist.driver import outcome
from sparkdist.driver.board import Board
from sparkdist.driver.console import Console
from sparkdist.driver.control import ControlChannel, RecordWriter
from sparkdist.driver.records import RecordFile
from sparkdist.driver.status import Status, phase_of
from sparkdist.errors import PreflightError, TrainingTimeout
from sparkdist.executor.last_words import rows_in
from sparkdist.executor.leader import Row
from sparkdist.executor.order import Order
from sparkdist.executor.shortage import shortage
from sparkdist.settings import Settings

_STACKS_TIME = 3.0  # s that agents get to send stacks
_INTERRUPT_GRACE = 2.0  # s between SIGTERM and SIGKILL after Ctrl-C
_ROWS_TIME = 2.0  # s that rows get to arrive after the ranks have been ended
_FAILED_TIME = 60.0  # s that they get after a failure: they say what it was
_LAST_WORDS_TIME = 2.0  # s that lines get to arrive after the rows: they come another way
_CANCEL_TIME = 10.0  # s; Spark needs 2 to 4 to kill a Python worker
_UNREACHABLE = (
    "executors cannot connect to the driver at {address}, or not all the time: the run goes on without live "
    "logs (they come with the result), start_timeout and stacks of a timeout. Set spark.driver.host to an "
    "address that executors reach, and ports= to ports that a firewall lets through."
)


class Gang(Protocol):
    """Where ranks run: a barrier job, or the driver."""

    def run(self) -> list[Row]:
        """Runs the gang to its end."""

    def cancel(self) -> None:
        """Ends it without its agents' help."""

    def is_unheard(self) -> bool:
        """Says whether its agents may be at work though none of them has reached the driver."""

    def waiting_for(self) -> str:
        """Says what it waits for while no agent has reported."""

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Returns the thread to run it in."""


def run_attempt(
    order: Order, settings: Settings, endpoint: tuple[str, str], make_gang: Callable[[Order], Gang]
) -> Board:
    """Runs one attempt to its end.

    Args:
        order: The attempt, but for the control channel.
        settings: Its time limits.
        endpoint: The control channel's addresses, to bind and to advertise.
        make_gang: Makes the gang from the finished order.

    Returns:
        All that is known of it; `rows` holds a result or the exception of Spark's side.

    Raises:
        PreflightError: The driver has no address or port for the control channel.
        TrainingTimeout: A limit passed.
        KeyboardInterrupt: Ctrl-C; the ranks have been ended.
    """
    board = Board()
    with ExitStack() as stack:
        records = _record_file(settings, order, stack)
        console = stack.enter_context(Console())
        channel = stack.enter_context(_listen(endpoint, board, console, records, order))
        order = replace(order, control=channel.address, token=channel.token.hex())
        gang = make_gang(order)
        phase = partial(phase_of, order, board, gang.waiting_for)
        console.show(Status(settings.status, phase, (order.attempt + 1, 1)))
        watch = _Watch(order, settings, board, channel, gang)
        try:
            watch.start()
            watch.wait()
        except KeyboardInterrupt:
            watch.end(_INTERRUPT_GRACE)
            raise
        except BaseException:
            watch.end(wire.GRACE)
            raise
        finally:
            channel.stop_ranks(0.0)  # those that Spark has given up
            channel.hear_out(_LAST_WORDS_TIME)
        for header, data in watch.rows():
            if header["kind"] == "log":
                console.write(header["rank"], header["stderr"], data, header["dropped"])
            elif header["kind"] == "record" and records:
                records(header["rank"], data)
    return board


def _listen(
    endpoint: tuple[str, str], board: Board, console: Console, records: RecordWriter | None, order: Order
) -> ControlChannel:
    try:
        return ControlChannel(*endpoint, board, console.write, records, order.ports)
    except OSError as error:
        reason = shortage(error) or error.strerror
        raise PreflightError(f"the driver cannot listen for its executors: {reason}") from error


def _record_file(settings: Settings, order: Order, stack: ExitStack) -> RecordWriter | None:
    if settings.logs_json is None:
        return None
    file = RecordFile(settings.logs_json, attempt=order.attempt, run_id=order.run_id)
    return stack.enter_context(file).write


class _Watch:
    """The waiting side of an attempt."""

    def __init__(
        self, order: Order, settings: Settings, board: Board, channel: ControlChannel, gang: Gang
    ) -> None:
        self._order = order
        self._settings = settings
        self._board = board
        self._channel = channel
        self._gang = gang
        self._warned = False
        self._began = time.monotonic()
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
                last_words = rows_in(outcome.message_of(error))
            if last_words is None:
                self._board.note(lambda board: board.rows.set_exception(reason))
                return
            rows = last_words
        self._board.note(lambda board: board.rows.set_result(rows))

    def wait(self) -> None:
        """Waits for the gang's rows.

        Raises:
            TrainingTimeout: `timeout` or `start_timeout` passed.
        """
        limits = {"start_timeout": self._settings.start_timeout}
        if self._settings.timeout is not None:
            limits["timeout"] = self._settings.timeout
        size = self._order.world_size
        self._reach(lambda b: b.rows.done() or bool(b.failed) or len(b.entered) == size, limits)
        del limits["start_timeout"]
        self._reach(lambda b: b.rows.done() or bool(b.failed), limits)
        if self._board.failed:
            self.end(wire.GRACE, _FAILED_TIME)  # its agents do so too; one that cannot be reached does not
        self._reach(lambda b: b.rows.done(), limits)

    def _reach(self, reached: Callable[[Board], bool], limits: dict[str, float]) -> None:
        name, seconds = min(limits.items(), key=lambda limit: limit[1], default=("", None))
        left = None if seconds is None else max(0.0, self._began + seconds - time.monotonic())
        if self._board.wait(reached, left) or seconds is None:
            return
        if name == "start_timeout" and self._is_unheard():
            self._warn()
            return
        raise self._timeout(name, seconds)

    def _is_unheard(self) -> bool:
        return self._board.gathered or (not self._board.nodes and self._gang.is_unheard())

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(_UNREACHABLE.format(address=self._order.control), stacklevel=2)

    def rows(self) -> list[Row]:
        """Returns the gang's rows, and says if they show that executors could not reach the driver."""
        rows = [] if self._board.rows.exception() else self._board.rows.result()
        # A killed agent says nothing about the driver.
        told = [header for header, _ in rows if header["kind"] != "lost"]
        if any(header.get("unheard") or header["kind"] in ("log", "record") for header in told):
            self._warn()
        return rows

    def _timeout(self, setting: str, seconds: float) -> TrainingTimeout:
        self._channel.ask_stacks()
        nodes = len(self._board.nodes)
        self._board.wait(lambda b: b.rows.done() or b.stack_reports >= nodes, _STACKS_TIME)
        missing = tuple(r for r in range(self._order.world_size) if r not in self._board.entered)
        return TrainingTimeout(setting, seconds, self._board.stacks, missing, self._phase())

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
        with suppress(Exception):  # what ended the gang is to be told, not that Spark is gone
            self._gang.cancel()
