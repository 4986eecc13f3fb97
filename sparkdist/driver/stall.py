"""Which ranks stall: agents say who does nothing, stacks say who of them waits for others.

A rank that waits for its peers does nothing because of them. So of the silent ranks those are to
blame that do not wait; and if all of them wait, all do.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sparkdist.driver.board import Board, Silence
from sparkdist.driver.control import ControlChannel
from sparkdist.errors import Failure, listed
from sparkdist.executor.leader import Row
from sparkdist.executor.order import Order
from sparkdist.frameworks import Framework, resolve

_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line \d+ in (.*)$', re.MULTILINE)
_FOR_A_THREAD = re.compile(r"/threading\.py$")  # where a thread waits for another of its process

_Frames = list[tuple[str, str]]  # files and functions, the innermost first


class Stalls:
    """Looks out for ranks that stall.

    Args:
        order: The attempt.
        board: What is known of it.
        channel: How its agents are asked for stacks.
    """

    def __init__(self, order: Order, board: Board, channel: ControlChannel) -> None:
        self._framework = resolve(order.framework, order.launcher)
        self._size = order.world_size
        self._board = board
        self._channel = channel
        self._pause = min(2.0, (order.stall_timeout or 0.0) / 5)  # s in which agents look at ranks twice
        self._seen: tuple[dict[int, Silence], int] = {}, 0

    def is_due(self) -> bool:
        """Says whether, other than at the last look, a rank is silent, or none is left that is not."""
        seen, returned = self._seen
        silent = self._silent()
        is_last = len(self._board.returned) > returned and len(silent) == self._left()
        return any(seen.get(rank) != silence for rank, silence in silent.items()) or (
            is_last and bool(silent)
        )

    def _silent(self) -> dict[int, Silence]:
        silent = dict(self._board.silent)
        return {rank: silence for rank, silence in silent.items() if rank not in self._board.returned}

    def _left(self) -> int:
        return self._size - len(self._board.returned)

    def find(self) -> dict[int, Failure]:
        """Asks for stacks and returns the ranks that stall, if there are any.

        A rank may be about to go on: its stack is looked at twice. Not that of one that slept until it
        was asked, whatever it does then: the signal that asks may have ended its sleep.
        """
        self._wait()  # ranks that wait for each other become silent one just after another
        found = self._look()
        surely, stacks = self._board.asleep, self._board.stacks
        if not found.keys() <= surely:
            self._wait()
            same = {
                rank
                for rank in self._look()
                if _main(self._board.stacks[rank]) == _main(stacks.get(rank, ""))
            }
            found = {rank: failure for rank, failure in found.items() if rank in surely | same}
        return {} if self._board.failed else found

    def _wait(self) -> None:
        self._board.wait(lambda b: b.rows.done() or bool(b.failed), self._pause)

    def _look(self) -> dict[int, Failure]:
        before, left = self._silent(), self._left()
        stacks = self._channel.ask_stacks()
        silent = before | self._silent()
        self._seen = silent, self._size - left
        silent = {rank: silence for rank, silence in silent.items() if rank in stacks}
        waits = {rank: operation(stacks[rank], self._framework) for rank in silent}
        now = time.monotonic()
        blamed = {
            rank: f"it has done nothing for {now - silence.since:.0f} s, and waits for no other rank; "
            f"{silence.state}"
            for rank, silence in silent.items()
            if not waits[rank]
        }
        if silent and not blamed and len(silent) == left:
            since = max(silence.since for silence in silent.values())
            blamed = dict.fromkeys(silent, _all_wait(waits, now - since))
        return {
            rank: Failure(rank=rank, kind="stalled", order=place, message=message)
            for place, (rank, message) in enumerate(sorted(blamed.items()))
        }


def _all_wait(waits: Mapping[int, str], seconds: float) -> str:
    """Says that all ranks wait, and in what; where not all in the same, this is mostly the cause."""
    by_operation: defaultdict[str, list[int]] = defaultdict(list)
    for rank, name in sorted(waits.items()):
        by_operation[name].append(rank)
    head = f"all {len(waits)} ranks that are left have waited for each other for {seconds:.0f} s"
    if len(by_operation) == 1:
        return f"{head}, in {next(iter(by_operation))}()"
    places = "; ".join(f"{name}(): rank {listed(ranks)}" for name, ranks in by_operation.items())
    return f"{head}, in different operations ({places})"


def operation(stack: str, framework: Framework) -> str:
    """Returns in what a rank waits for its peers or the store, by its stack; "" where it does not.

    Args:
        stack: What faulthandler printed, or anything else.
        framework: Says what such a wait looks like.
    """
    if not framework.waits:
        return ""
    main: _Frames = _FRAME.findall(_main(stack))
    if main and _FOR_A_THREAD.search(main[0][0]):
        threads: list[_Frames] = [_FRAME.findall(part) for part in _THREAD.split(stack)[1:-1]]
        return next(filter(None, (_wait(frames, framework) for frames in threads)), "")
    return _wait(main, framework)


def _main(stack: str) -> str:
    """Returns the main thread's part of a stack: the oldest thread comes last."""
    return _THREAD.split(stack)[-1]


def _wait(frames: _Frames, framework: Framework) -> str:
    """Looks at the frames from the innermost up to the user's own, which may be called by the framework."""
    names = []
    for file, function in frames:
        if re.search(framework.waits, f"{file} {function}"):
            names.append(function)
        elif f"/{framework.distribution}/" not in file:
            break
    public = [name for name in names if not name.startswith("_")]
    return [*names[:1], *public][-1] if names else ""


def with_last_lines(failures: Mapping[int, Failure], rows: Iterable[Row]) -> dict[int, Failure]:
    """Adds ranks' last lines to their failures, as far as the gang's rows have brought them."""
    tails = {header["rank"]: tuple(header["log_tail"]) for header, _ in rows if header.get("log_tail")}
    return {rank: replace(failure, log_tail=tails.get(rank, ())) for rank, failure in failures.items()}
