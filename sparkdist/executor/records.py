"""What a rank says through Python's logging, as data for its agent."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from sparkdist import values, wire


class Teller:
    """Sends frames from a thread of its own, in the order they come, each in one piece.

    A frame may be given by any thread, and by a signal handler that runs in the middle of another
    one or leaves it by an exception.

    Args:
        send: Sends one frame.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sparkdist-teller", daemon=True)
        self._thread.start()

    def put(self, frame: bytes) -> None:
        """Has a frame sent."""
        self._frames.put(frame)

    def finish(self) -> None:
        """Waits until all frames have been sent."""
        self._frames.put(None)
        self._thread.join()

    def _run(self) -> None:
        while frame := self._frames.get():
            self._send(frame)


def tell(put: Callable[[bytes], None]) -> None:
    """Has every record that a logger of this process handles told as well; handlers stay the user's.

    Not a handler of our own: logging.basicConfig() does nothing where the root logger has one.

    Args:
        put: Takes one frame for the agent.
    """
    owner = os.getpid()
    call_handlers = logging.Logger.callHandlers

    def tell_too(self: logging.Logger, record: logging.LogRecord) -> None:
        if os.getpid() == owner:  # what is forked from a rank has its pipe, but not the thread that sends
            put(wire.pack({"kind": "record", "record": _as_data(record)}))
        call_handlers(self, record)

    logging.Logger.callHandlers = tell_too  # type: ignore[method-assign]


def _as_data(record: logging.LogRecord) -> dict[str, Any]:
    try:
        message = record.getMessage()
    except Exception as error:  # arguments that do not fit; logging itself reports that to stderr
        message = f"{record.msg!r} with {record.args!r}: {values.safe_text(error)}"
    data = {
        "time": float(record.created),
        "level": str(record.levelname),
        "logger": str(record.name),
        "message": wire.cut(message),
    }
    if record.exc_info and record.exc_info[0]:
        data["exception"] = wire.cut("".join(traceback.format_exception(*record.exc_info)))
    return data
