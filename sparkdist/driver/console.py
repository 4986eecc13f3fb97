"""Ranks' output on the driver's stdout and stderr, printed by a thread of its own."""

from __future__ import annotations

import sys
import threading
import time
from itertools import groupby
from typing import TextIO

from sparkdist.driver.lines import OURS, Lines
from sparkdist.driver.outlet import Outlet
from sparkdist.driver.status import Status
from sparkdist.executor.backlog import Backlog, Piece

_BATCH = 1 << 18  # bytes printed at once
_PATIENCE = 3.0  # s without progress after which streams are given up at the end of a run
_LOOK_AGAIN = 0.1  # s between looks at whether there is some
_LEAVE = 1.0  # s that the thread gets to notice that
_BREATH = 0.05  # s between batches while a status line has to make room for each
_UNREAD = "sparkdist: {count} lines of the ranks were not printed: nobody reads the driver's output\n"


class Console:
    """Prints ranks' lines, each behind its rank, and below them the run's status.

    Whoever has lines never waits for whoever reads them. As a context manager it prints, at its
    end, what still waits, unless nobody reads it.

    Args:
        stdout: Where what ranks write to theirs goes; None for the driver's at that time.
        stderr: Likewise, and what sparkdist says.
        with_time: Whether each line says when it came.
    """

    def __init__(
        self, stdout: TextIO | None = None, stderr: TextIO | None = None, with_time: bool = False
    ) -> None:
        self._streams = stdout, stderr
        self._news = threading.Condition()
        self._backlog = Backlog()
        self._lines = Lines(with_time)
        self._outlet = Outlet()
        self._status: Status | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="sparkdist-console", daemon=True)

    def __enter__(self) -> Console:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._news:
            self._is_closing = True
            self._news.notify()
        try:
            moves, since = -1, 0.0
            while self._thread.is_alive():
                if moves != self._outlet.moves:
                    moves, since = self._outlet.moves, time.monotonic()
                elif time.monotonic() - since > _PATIENCE:
                    break
                self._thread.join(_LOOK_AGAIN)
        finally:  # an interrupt, too, gives up what still waits
            self._outlet.given_up = True
            self._thread.join(_LEAVE)

    def write(self, rank: int, is_stderr: bool, data: bytes, dropped: int = 0) -> None:
        """Has whole lines of one rank printed: its stdout to stdout, its stderr to stderr.

        Args:
            rank: The rank.
            is_stderr: Where they come from.
            data: The lines.
            dropped: How many its agent dropped before them.
        """
        with self._news:
            self._backlog.add(rank, is_stderr, data, dropped)
            self._news.notify()

    def say(self, text: str) -> None:
        """Has something printed to stderr that is no rank's."""
        self.write(OURS, True, text.encode() + b"\n")

    def show(self, status: Status) -> None:
        """Shows a status from now on, instead of the one before."""
        with self._news:
            self._status = status
            self._news.notify()

    def _run(self) -> None:
        left, shown = 0, self._status
        while not self._outlet.given_up and (pieces := self._wait()) is not None:
            if shown is not self._status:
                if shown:
                    shown.end(self._outlet)
                shown = self._status
            left += self._print(pieces)
            if self._status and not self._backlog:
                self._status.draw(self._outlet)
                if pieces and self._status.is_in_the_way:
                    self._breathe()
        if self._status:
            self._status.end(self._outlet)
        with self._news:
            left += self._backlog.lines()
        for is_stderr in (False, True):
            left += self._put(is_stderr, self._lines.rest(is_stderr))
        if left:
            self._outlet.put(self._stream(True), _UNREAD.format(count=left))

    def _wait(self) -> list[Piece] | None:
        """Returns the next pieces, none where only the status may have changed, None at the end."""
        with self._news:
            status = self._status
            self._news.wait_for(
                lambda: self._backlog or self._is_closing or self._status is not status,
                status.pause if status else None,
            )
            if not self._backlog and self._is_closing:
                return self._backlog.take_dropped() or None
            return self._backlog.take(_BATCH)

    def _breathe(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._is_closing, _BREATH)

    def _print(self, pieces: list[Piece]) -> int:
        """Prints pieces; returns how many lines of them could not be printed."""
        left = 0
        for is_stderr, group in groupby(pieces, lambda piece: piece.is_stderr):
            left += self._put(is_stderr, "".join(map(self._lines.text, group)))
        return left

    def _put(self, is_stderr: bool, text: str) -> int:
        if not text:
            return 0
        stream = self._stream(is_stderr)
        if self._status:
            self._status.make_way(self._outlet)
            text = self._status.beside_others(stream, text)
        return self._outlet.put(stream, text)

    def _stream(self, is_stderr: bool) -> TextIO:
        # The driver's are looked up each time: tests and notebooks replace them.
        return self._streams[is_stderr] or (sys.stderr if is_stderr else sys.stdout)
