"""One attempt: the gang is started, watched against the clock, and ended, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from sparkdist import wire
from sparkdist.driver import progress
from sparkdist.driver.board import Board
from sparkdist.driver.console import Console
from sparkdist.driver.control import ControlChannel, RecordWriter
from sparkdist.driver.growth import Growth
from sparkdist.driver.records import RecordFile
from sparkdist.driver.slots import Slots
from sparkdist.driver.status import Status, phase_of
from sparkdist.driver.watch import Gang, Watch
from sparkdist.errors import PreflightError
from sparkdist.executor.order import Order
from sparkdist.executor.shortage import shortage
from sparkdist.settings import Settings

_INTERRUPT_GRACE = 2.0  # s between SIGTERM and SIGKILL after Ctrl-C
_LAST_WORDS_TIME = 2.0  # s that lines get to arrive after the rows: they come another way


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, prepared.

    Attributes:
        order: Its first attempt with all the ranks it would have, but for the control channel.
        make_gang: Makes a gang from an attempt's finished order.
        endpoint: The control channel's addresses, to bind and to advertise.
        slots: The cluster's; None on the driver.
        settings: The run's.
        deadline: When it has to be over (time.monotonic()), or None.
    """

    order: Order
    make_gang: Callable[[Order], Gang]
    endpoint: tuple[str, str]
    slots: Slots | None
    settings: Settings
    deadline: float | None


def run_attempt(
    plan: Plan,
    order: Order,
    board: Board,
    console: Console,
    numbers: tuple[int, int],
    growth: Growth | None,
) -> None:
    """Runs one attempt to its end.

    Args:
        plan: The run.
        order: The attempt, but for the control channel.
        board: Gets all that is known of it; at the end `rows` holds a result or the exception of
            Spark's side.
        console: Gets its lines, and shows how far it is.
        numbers: Which attempt this is, from 1, and how many there may be.
        growth: Ends it when there are slots for more ranks; None for never.

    Raises:
        PreflightError: The driver has no address or port for the control channel.
        TrainingTimeout: A limit passed.
        GangGrows: It was ended to go on with more ranks.
        KeyboardInterrupt: Ctrl-C; the ranks have been ended.
    """
    settings = plan.settings
    with ExitStack() as stack:
        records = _record_file(settings, order, stack)
        channel = stack.enter_context(_listen(plan.endpoint, board, console, records, order))
        order = replace(order, control=channel.address, token=channel.token.hex())
        gang = plan.make_gang(order)
        phase = partial(phase_of, order, board, gang.waiting_for)
        console.show(Status(settings.status, phase, numbers, partial(progress.headline, board)))
        watch = Watch(order, settings, board, channel, gang, plan.deadline, growth)
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
            elif header["kind"] == "report":
                progress.take(board, header["rank"], data)
            elif header["kind"] == "record" and records:
                records(header["rank"], data)


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
