"""What a rank tells its agent: frames on a pipe that any of its threads and signal handlers may write to.

No lock and no queue: a signal handler may run in the middle of another call or leave it by an
exception, and a rank may end right behind one. But a write of at most PIPE_BUF bytes is one piece
(POSIX, pipe(7)), so that larger frames travel in parts, each a frame in itself.
"""

from __future__ import annotations

import array
import fcntl
import itertools
import os
import select
import termios
import time
from collections.abc import Iterable, Iterator

from sparkdist import wire

_PART = select.PIPE_BUF - 256  # bytes of a part's body; its header needs fewer than the rest
_READ_TIME = 0.1  # s that an agent gets to read; it needs some tenths of a millisecond
_LOOK_AGAIN = 2e-4  # s; there is no event for a pipe that has been emptied

_numbers = itertools.count()


def tell(fd: int, header: wire.Header) -> None:
    """Writes one frame, whole even where others write at the same time."""
    data = wire.pack(header)
    if len(data) <= select.PIPE_BUF:
        os.write(fd, data)
        return
    name = f"{os.getpid()}/{next(_numbers)}"
    for start in range(0, len(data), _PART):
        body = data[start : start + _PART]
        part = {"kind": "part", "of": name, "is_last": start + _PART >= len(data)}
        os.write(fd, wire.pack(part, len(body)) + body)


def wait_until_read(pipes: Iterable[int]) -> None:
    """Waits a moment until the agent has read other pipes, so that what is told next comes after that."""
    deadline = time.monotonic() + _READ_TIME
    while any(map(_unread, pipes)) and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN)


def _unread(pipe: int) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, size)
    return size[0]


class Listener:
    """Puts together what a rank has told."""

    def __init__(self) -> None:
        self._frames = wire.FrameReader(max_body=_PART)
        self._parts: dict[str, bytearray] = {}

    def feed(self, data: bytes) -> Iterator[wire.Header]:
        """Yields the headers that `data` completes."""
        for header, body in self._frames.feed(data):
            if header["kind"] != "part":
                yield header
                continue
            whole = self._parts.setdefault(header["of"], bytearray())
            whole += body
            if header["is_last"]:
                del self._parts[header["of"]]
                for told, _ in wire.FrameReader(max_body=0).feed(bytes(whole)):
                    yield told
