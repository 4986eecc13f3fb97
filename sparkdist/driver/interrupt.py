"""Ctrl-C, and an interrupted notebook cell, while a run is on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Lets SIGINT raise KeyboardInterrupt in the main thread, and nothing else, for a while.

    pyspark's own handler loses its cancel or cancels the jobs of everybody. In another thread than
    the main one nothing is changed: signals do not reach it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        # None: it was set by something other than Python, which cannot be put back from here.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
