"""Writing to the driver's stdout and stderr, whatever they are, without getting stuck in them."""

from __future__ import annotations

import os
import select
from io import TextIOWrapper
from typing import TextIO

_CHUNK = 4096  # bytes; a pipe that can take anything can take these
_LOOK_AGAIN = 100  # ms between looks at whether a full stream has been given up


class Outlet:
    """Puts text into streams.

    Attributes:
        moves: Grows whenever a stream has taken something.
        given_up: Set by another thread to end the wait for a stream that nobody reads.
    """

    def __init__(self) -> None:
        self.moves = 0
        self.given_up = False

    def put(self, stream: TextIO, text: str) -> int:
        """Writes text, waiting for the stream as long as it is not given up.

        Returns:
            How many lines it has not taken because it was given up. What a broken or closed stream
            does not take does not count: nobody misses it.
        """
        try:
            # A subclass, or anything else, may do more than write to its descriptor.
            if type(stream) is TextIOWrapper and (fd := _descriptor(stream)) is not None:
                data = text.encode(stream.encoding, errors="backslashreplace")
                if not self._is_open(fd):
                    return data.count(b"\n")
                stream.flush()  # what others have written into it
                return self._feed(fd, data)
            _write(stream, text)
        except Exception:
            pass  # whoever made the stream knows why; the training goes on
        self.moves += 1
        return 0

    def _feed(self, fd: int, data: bytes) -> int:
        # Not by the stream: a thread that is stuck in its write keeps its lock, and Python dies of
        # that when it exits.
        start = 0
        while start < len(data) and self._is_open(fd):
            end = data.rfind(b"\n", start, start + _CHUNK) + 1 or start + _CHUNK
            try:
                start += os.write(fd, data[start:end])
            except BlockingIOError:
                continue
            self.moves += 1
        return data.count(b"\n", start)

    def _is_open(self, fd: int) -> bool:
        """Waits until a stream takes something; returns False if it has been given up before."""
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while not poll.poll(0 if self.given_up else _LOOK_AGAIN):
            if self.given_up:
                return False
        return True


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None  # closed, or it writes to memory


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError as error:
        stream.write(text.encode(error.encoding, errors="backslashreplace").decode(error.encoding))
    stream.flush()
