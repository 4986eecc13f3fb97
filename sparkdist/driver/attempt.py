"""One attempt: the gang is started, watched against the clock, and ended, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from sparkdist import wire
from sparkdist.driver import progress
from sparkdist.driver.board import Board
from sparkdist.driver.console import Console
from sparkdist.driver.control import ControlChannel, RecordWriter
from sparkdist.driver.records import RecordFile
from sparkdist.driver.status import Status, phase_of
from sparkdist.driver.watch import Gang, Watch
from sparkdist.errors import PreflightError
from sparkdist.executor.order import Order
from sparkdist.settings import Settings

_INTERRUPT_GRACE = 2.0  # s between SIGTERM and SIGKILL after Ctrl-C
_LAST_WORDS_TIME = 2.0  # s that lines get to arrive after the rows: they come another way


def run_attempt(
    order: Order,
    settings: Settings,
    endpoint: tuple[str, str],
    make_gang: Callable[[Order], Gang],
    deadline: float | None = None,
    attempts: int = 1,
) -> Board:
    """Runs one attempt to its end.

    Args:
        order: The attempt, but for the control channel.
        settings: Its time limits.
        endpoint: The control channel's addresses, to bind and to advertise.
        make_gang: Makes the gang from the finished order.
        deadline: When the run has to be over (time.monotonic()), or None.
        attempts: How many there may be, as far as that is known.

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
        count = order.attempt + 1, attempts
        console.show(Status(settings.status, phase, count, partial(progress.headline, board)))
        watch = Watch(order, settings, board, channel, gang, deadline)
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
                console.write(header["rank"], header["stderr"], data)
            elif header["kind"] == "report":
                progress.take(board, header["rank"], data)
            elif header["kind"] == "record" and records:
                records(header["rank"], data)
    return board


def _listen(
    endpoint: tuple[str, str], board: Board, console: Console, records: RecordWriter | None, order: Order
) -> ControlChannel:
    try:
        return ControlChannel(*endpoint, board, console.write, records, order.ports)
    except OSError as error:
        raise PreflightError(f"the driver cannot listen for its executors: {error.strerror}") from error


def _record_file(settings: Settings, order: Order, stack: ExitStack) -> RecordWriter | None:
    if settings.logs_json is None:
        return None
    file = RecordFile(settings.logs_json, attempt=order.attempt, run_id=order.run_id)
    return stack.enter_context(file).write
