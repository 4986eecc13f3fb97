"""Ranks' output on its way to the driver: whole lines, a bounded amount, and each rank's last ones."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

_CHUNK = 1 << 16
_LINE_LIMIT = 1 << 16  # bytes; a longer line is passed on in pieces
_TAIL = 100  # lines kept per rank for its failure
_TAIL_LINE = 2000  # bytes of a line that are kept there


class LogPump:
    """Reads one rank's stdout and stderr and hands on whole lines.

    Args:
        rank: The rank.
        emit: Called with (rank, is_stderr, data) for data that ends where a line does, or where it
            is to be drawn again; None if nobody wants them.
    """

    def __init__(self, rank: int, emit: Callable[[int, bool, bytes], None] | None) -> None:
        self._rank = rank
        self._emit = emit
        self._partial = {False: b"", True: b""}
        self._tail: deque[bytes] = deque(maxlen=_TAIL)

    def pump(self, fd: int, is_stderr: bool) -> int | None:
        """Reads once; returns how many bytes came, 0 at the end of the stream, None if there are none yet."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return None
        if not data:
            return 0
        said = _with_short_lines(self._partial[is_stderr] + data)
        end = max(said.rfind(b"\n"), said.rfind(b"\r")) + 1  # a progress bar is drawn again behind a \r
        self._partial[is_stderr] = said[end:]
        if end:
            self._pass(is_stderr, said[:end])
        return len(data)

    def finish(self, fds: dict[bool, int]) -> None:
        """Reads what is left in the pipes, and passes on a last line that has no end."""
        for is_stderr, fd in fds.items():
            while self.pump(fd, is_stderr):
                pass
            if self._partial[is_stderr]:
                self._pass(is_stderr, self._partial[is_stderr] + b"\n")
                self._partial[is_stderr] = b""

    def _pass(self, is_stderr: bool, data: bytes) -> None:
        ended = data.split(b"\n")[-_TAIL - 1 : -1]
        # Of a line that was drawn over and over, what it showed last.
        self._tail.extend(line.rstrip(b"\r").rpartition(b"\r")[2][:_TAIL_LINE] for line in ended)
        if self._emit:
            self._emit(self._rank, is_stderr, data)

    def tail(self) -> list[str]:
        """Returns the last lines, stdout and stderr as they came."""
        return [line.decode(errors="backslashreplace") for line in self._tail]


def _with_short_lines(said: bytes) -> bytes:
    """Splits the lines that are too long, but not in the middle of a character of UTF-8."""
    if len(said) <= _LINE_LIMIT:
        return said
    short = []
    for line in said.split(b"\n"):
        while len(line) > _LINE_LIMIT:
            end = next(
                (e for e in range(_LINE_LIMIT, _LINE_LIMIT - 4, -1) if line[e] & 0xC0 != 0x80), _LINE_LIMIT
            )
            short.append(line[:end])
            line = line[end:]
        short.append(line)
    return b"\n".join(short)
