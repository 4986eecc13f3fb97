"""What a rank says through Python's logging, as data for its agent."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from typing import Any

from sparkdist import values, wire


def tell(say: Callable[..., None]) -> None:
    """Has every record that a logger of this process handles told as well; handlers stay the user's.

    Not a handler of our own: logging.basicConfig() does nothing where the root logger has one.

    Args:
        say: Sends one frame to the agent.
    """
    owner = os.getpid()
    call_handlers = logging.Logger.callHandlers

    def tell_too(self: logging.Logger, record: logging.LogRecord) -> None:
        if os.getpid() == owner:  # a process forked from the rank shares its pipe, but not the lock on it
            say(kind="record", records=[_as_data(record)])
        call_handlers(self, record)

    logging.Logger.callHandlers = tell_too  # type: ignore[method-assign]


def _as_data(record: logging.LogRecord) -> dict[str, Any]:
    try:
        message = record.getMessage()
    except Exception as error:  # arguments that do not fit; logging itself reports that to stderr
        message = f"{record.msg!r} with {record.args!r}: {values.safe_text(error)}"
    data = {
        "time": record.created,
        "level": record.levelname,
        "logger": record.name,
        "message": wire.cut(message),
    }
    if record.exc_info and record.exc_info[0]:
        data["exception"] = wire.cut("".join(traceback.format_exception(*record.exc_info)))
    return data
