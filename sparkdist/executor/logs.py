"""Ranks' output on its way to the driver: whole lines, a bounded amount, and each rank's last ones."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_CHUNK = 1 << 16
_LINE_LIMIT = 1 << 16  # bytes; a longer line is passed on in pieces
_TAIL = 100  # lines kept per rank for its failure
_TAIL_LINE = 2000  # bytes of a line that are kept there

_PIECE = 1 << 15  # bytes from which on lines are not added to those that wait already
_FULL = bytearray(_PIECE)

Piece = tuple[int, bool, bytes]  # rank, is_stderr, whole lines


@dataclass
class _Waiting:
    """One rank's lines that wait."""

    pieces: deque[tuple[int, bool, bytearray]] = field(default_factory=deque)  # when they came, and what
    size: int = 0  # bytes
    dropped: int = 0  # lines


class LogBuffer:
    """Lines that wait for a reader: so many bytes of each rank, of which the oldest make room.

    Args:
        limit: Bytes that may wait for each rank.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ranks: dict[int, _Waiting] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return any(waiting.pieces for waiting in self._ranks.values())

    def add(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Takes whole lines, and drops the rank's oldest ones where they are too many."""
        waiting = self._ranks.setdefault(rank, _Waiting())
        _, last_is_stderr, last = waiting.pieces[-1] if waiting.pieces else (0, False, _FULL)
        if last_is_stderr == is_stderr and len(last) < _PIECE:
            last += data
        else:
            self._count += 1
            waiting.pieces.append((self._count, is_stderr, bytearray(data)))
        waiting.size += len(data)
        self._shrink(waiting, self._limit)

    def put_back(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Takes lines back that were taken last, and not read."""
        waiting = self._ranks[rank]
        waiting.pieces.appendleft((0, is_stderr, bytearray(data)))
        waiting.size += len(data)
        self._shrink(waiting, self._limit)

    def shrink(self, limit: int) -> None:
        """Lowers the limit."""
        self._limit = min(limit, self._limit)
        for waiting in self._ranks.values():
            self._shrink(waiting, self._limit)

    def _shrink(self, waiting: _Waiting, limit: int) -> None:
        while waiting.size > limit:
            _, _, data = waiting.pieces.popleft()
            waiting.size -= len(data)
            waiting.dropped += data.count(b"\n")

    def take(self) -> Piece | None:
        """Returns the lines that came first, behind a notice of what was dropped; None if there are none."""
        ranks = [rank for rank, waiting in self._ranks.items() if waiting.pieces]
        if not ranks:
            return None
        rank = min(ranks, key=lambda rank: self._ranks[rank].pieces[0][0])
        waiting = self._ranks[rank]
        _, is_stderr, data = waiting.pieces.popleft()
        waiting.size -= len(data)
        if waiting.dropped:
            notice = b"... %d lines dropped: %d MiB of a rank's lines are kept until they are read\n"
            data = bytearray(notice % (waiting.dropped, self._limit >> 20)) + data
            waiting.dropped = 0
        return rank, is_stderr, bytes(data)

    def drain(self) -> Iterator[Piece]:
        """Takes all that wait, in the order they came."""
        while piece := self.take():
            yield piece


class LogPump:
    """Reads one rank's stdout and stderr and hands on whole lines.

    Args:
        rank: The rank.
        emit: Called with (rank, is_stderr, data) for data that ends where a line does; None if
            nobody wants them.
    """

    def __init__(self, rank: int, emit: Callable[[int, bool, bytes], None] | None) -> None:
        self._rank = rank
        self._emit = emit
        self._partial = {False: b"", True: b""}
        self._tail: deque[bytes] = deque(maxlen=_TAIL)

    def pump(self, fd: int, is_stderr: bool) -> bool:
        """Reads once what is there; returns False when nothing more will come, or comes now."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return False
        whole, newline, rest = (self._partial[is_stderr] + data).rpartition(b"\n")
        if len(rest) > _LINE_LIMIT:
            whole, newline, rest = whole + newline + rest, b"\n", b""
        self._partial[is_stderr] = rest
        if newline:
            self._pass(is_stderr, whole + newline)
        return True

    def finish(self, fds: dict[bool, int]) -> None:
        """Reads what is left in the pipes, and passes on a last line that has no end."""
        for is_stderr, fd in fds.items():
            while self.pump(fd, is_stderr):
                pass
            if self._partial[is_stderr]:
                self._pass(is_stderr, self._partial[is_stderr] + b"\n")
                self._partial[is_stderr] = b""

    def _pass(self, is_stderr: bool, data: bytes) -> None:
        self._tail.extend(line[:_TAIL_LINE] for line in data.splitlines()[-_TAIL:])
        if self._emit:
            self._emit(self._rank, is_stderr, data)

    def tail(self) -> list[str]:
        """Returns the last lines, stdout and stderr as they came."""
        return [line.decode(errors="backslashreplace") for line in self._tail]
