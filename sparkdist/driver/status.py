"""One line that says how far a run is, on a terminal or in a notebook, as long as the run lasts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TextIO

from sparkdist.driver.board import Board
from sparkdist.driver.outlet import Outlet
from sparkdist.executor.order import Order

_FIRST = 0.5  # s before anything is said: a warm run is over by then
_PAUSE = 0.25  # s between looks at the phase
_WIDTH = 80  # columns, where a terminal does not say

_ERASE = "\r\x1b[K"

Phase = Callable[[], tuple[str, float | None]]  # what is going on, and since when if that is of interest


class Screen(Protocol):
    """Where a status is shown."""

    @property
    def is_in_the_way(self) -> bool:
        """Whether it has to be removed before other output."""

    def show(self, text: str, phase: str, outlet: Outlet) -> None:
        """Shows a status, or only the phase of it, which changes less often."""

    def make_way(self, outlet: Outlet) -> None:
        """Removes it before other output."""

    def end(self, outlet: Outlet) -> None:
        """Removes it for good."""


class Status:
    """A run's status.

    Args:
        wanted: True: in any case. False: never. None: where somebody can see it.
        phase: Says what is going on; called from the console's thread.
        attempt: Which attempt this is, from 1, and how many there may be.
        progress: Says how far the training is, or ""; called from there too.
    """

    def __init__(
        self,
        wanted: bool | None,
        phase: Phase,
        attempt: tuple[int, int] = (1, 1),
        progress: Callable[[], str] = str,
    ) -> None:
        self._phase = phase
        self._progress = progress
        self._attempt = f", attempt {attempt[0]} of {attempt[1]}" if attempt[1] > 1 else ""
        self._screen = None if wanted is False else _find_screen(bool(wanted))
        self._first = time.monotonic() + _FIRST

    @property
    def pause(self) -> float | None:
        """Seconds between two calls of `draw`; None if there is nothing to draw on."""
        return _PAUSE if self._screen else None

    @property
    def is_in_the_way(self) -> bool:
        """Whether it has to be removed before other output."""
        return bool(self._screen and self._screen.is_in_the_way)

    def draw(self, outlet: Outlet) -> None:
        """Shows the phase as it is now."""
        if self._screen and time.monotonic() >= self._first:
            self._try(lambda screen: screen.show(*self._texts(), outlet), outlet)

    def make_way(self, outlet: Outlet) -> None:
        """Removes it until it is drawn again."""
        self._try(lambda screen: screen.make_way(outlet), outlet)

    def beside_others(self, stream: TextIO, text: str) -> str:
        """Returns lines such that they leave nothing of another run's status beside them."""
        if _Terminal.owner in (None, self._screen) or not _is_terminal(stream):
            return text
        return "".join(_ERASE + line for line in text.splitlines(keepends=True))

    def end(self, outlet: Outlet) -> None:
        """Removes it."""
        self._try(lambda screen: screen.end(outlet), outlet)
        self._screen = None

    def _texts(self) -> tuple[str, str]:
        words, since = self._phase()
        clock = "" if since is None else f" {_clock(since)}"
        progress = "" if since is None else self._progress()
        long = f"sparkdist: {words}{clock}{self._attempt}{', ' if progress else ''}{progress}"
        return long, f"sparkdist: {words}{self._attempt}"

    def _try(self, action: Callable[[Screen], None], outlet: Outlet) -> None:
        screen = self._screen
        if not screen:
            return
        try:
            action(screen)
        except Exception:
            self._screen = None  # the run goes on without it
            with suppress(Exception):
                screen.end(outlet)


def phase_of(order: Order, board: Board, waiting_for: Callable[[], str]) -> tuple[str, float | None]:
    """Says what an attempt is doing, and since when if it is the training itself.

    Args:
        order: The attempt.
        board: What is known of it.
        waiting_for: Says what it waits for while no agent has reported.
    """
    if board.failed:
        return f"rank {board.failed[0]} failed, ending the others", None
    if not board.nodes:
        return waiting_for().removeprefix("still "), None
    size, entered = order.world_size, len(board.entered)
    if entered == size:
        return "running", max(list(board.entered.values()))
    where = f" on {len(board.nodes)} executors" if len(board.nodes) > 1 else ""
    ready = f" ({entered} ready)" if entered else ""
    return f"starting {size} rank{'s' * (size > 1)}{where}{ready}", None


def _clock(since: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - since), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"


def _find_screen(is_wanted: bool) -> Screen | None:
    # Nobody is in a notebook who has not imported it.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel"):
        return _Notebook()
    if _is_terminal(sys.stderr) and os.environ.get("TERM", "") not in ("", "dumb"):
        return _Terminal(sys.stderr)
    return _Plain(sys.stderr) if is_wanted else None


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except Exception:
        return False  # there is none, it is closed, or it is something else


class _Terminal:
    """The last line of a terminal. The cursor waits at its start: what others print begins there.

    Attributes:
        owner: Which of several runs in this process has the line, as long as it lasts.
    """

    owner: _Terminal | None = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""

    @property
    def is_in_the_way(self) -> bool:
        return bool(self._shown)

    def show(self, text: str, phase: str, outlet: Outlet) -> None:
        if _Terminal.owner not in (None, self):
            return
        _Terminal.owner = self
        # One column stays free: a terminal may go to its next line behind the last.
        width = os.get_terminal_size(self._stream.fileno()).columns or _WIDTH
        text = text[: width - 1]
        if text != self._shown:
            self._shown = text
            outlet.put(self._stream, f"{_ERASE}{text}\r")

    def make_way(self, outlet: Outlet) -> None:
        if self._shown:
            self._shown = ""
            outlet.put(self._stream, _ERASE)

    def end(self, outlet: Outlet) -> None:
        if _Terminal.owner is self:
            self.make_way(outlet)
            _Terminal.owner = None


class _Plain:
    """A file or a pipe, where somebody asked for it: one line for each phase."""

    is_in_the_way = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said = ""

    def show(self, text: str, phase: str, outlet: Outlet) -> None:
        if phase != self._said:
            self._said = phase
            outlet.put(self._stream, f"{phase}\n")

    def make_way(self, outlet: Outlet) -> None: ...

    def end(self, outlet: Outlet) -> None: ...


class _Notebook:
    """An output of the running cell, which is left empty."""

    is_in_the_way = False

    def __init__(self) -> None:
        self._handle: Any = None
        self._said = ""

    def show(self, text: str, phase: str, outlet: Outlet) -> None:
        if text != self._said:
            self._said = text
            self._say({"text/plain": text})

    def make_way(self, outlet: Outlet) -> None: ...

    def end(self, outlet: Outlet) -> None:
        if self._handle:
            self._say({})

    def _say(self, bundle: dict[str, str]) -> None:
        if self._handle:
            self._handle.update(bundle, raw=True)
        else:
            self._handle = sys.modules["IPython"].display.display(bundle, raw=True, display_id=True)
