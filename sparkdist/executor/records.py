"""What a rank says through Python's logging, as data for its agent."""

from __future__ import annotations

import logging
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from sparkdist import values, wire


def tell(say: Callable[[wire.Header], None]) -> None:
    """Has every record that a logger of this process handles told as well; handlers stay the user's.

    Not a handler of our own: logging.basicConfig() does nothing where the root logger has one.

    Args:
        say: Takes one frame for the agent.
    """
    owner, host = os.getpid(), socket.gethostname()
    call_handlers = logging.Logger.callHandlers

    def tell_too(self: logging.Logger, record: logging.LogRecord) -> None:
        if os.getpid() == owner:  # what is forked from a rank has its pipe, but is no rank
            say({"kind": "record", "data": {"host": host, **_as_data(record)}})
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
