"""From any bytes that a rank prints to lines that are safe to show."""

from __future__ import annotations

import re
import time
import unicodedata
from dataclasses import dataclass
from functools import cache

from sparkdist.executor.backlog import Piece

OURS = -1  # instead of a rank: what the driver says

_ODD = re.compile(r"[^ -~\t\n]+")
_REDRAW = 0.5  # s between two looks at a line that is drawn again and again
_DROPPED = "... {count} lines dropped: the driver's output is read too slowly"


@dataclass
class _Bar:
    """A line that has not ended, drawn over and over behind carriage returns.

    Attributes:
        text: What it shows now.
        is_told: Whether that has been shown.
        told_at: When something of such a line was shown last.
    """

    text: str = ""
    is_told: bool = True
    told_at: float = 0.0


class Lines:
    """Turns pieces into text, each line behind its rank.

    Of a line with carriage returns, such as a progress bar, the last thing is shown that a terminal
    would show, and before its end what it shows then, twice a second.

    Args:
        with_time: Whether each line also says when the driver had it.
    """

    def __init__(self, with_time: bool = False) -> None:
        self._time = "%Y-%m-%d %H:%M:%S " if with_time else ""
        self._bars: dict[tuple[int, bool], _Bar] = {}

    def text(self, piece: Piece) -> str:
        """Returns a piece's lines, with a notice of those dropped before them."""
        said = piece.data.decode(errors="backslashreplace")
        stream = piece.rank, piece.is_stderr
        if "\r" in said or stream in self._bars:
            lines = self._drawn(self._bars.setdefault(stream, _Bar()), said)
        else:
            lines = [said.removesuffix("\n")] if said else []
        if piece.dropped:
            lines.insert(0, _DROPPED.format(count=piece.dropped))
        return self._behind_rank(piece.rank, lines)

    def rest(self, is_stderr: bool) -> str:
        """Returns the lines of a stream that never ended, as far as they have not been shown."""
        bars = [(rank, bar) for (rank, of_stderr), bar in self._bars.items() if of_stderr == is_stderr]
        return "".join(self._behind_rank(rank, [bar.text]) for rank, bar in bars if not bar.is_told)

    def _drawn(self, bar: _Bar, said: str) -> list[str]:
        *ended, rest = said.split("\n")
        lines: list[str] = []
        for line in ended:
            shown = _last_drawn(line)
            if shown or not bar.text:
                lines.append(shown)
            elif not bar.is_told:
                lines.append(bar.text)
            bar.text, bar.is_told = "", True
        if shown := _last_drawn(rest):
            now = time.monotonic()
            bar.text, bar.is_told = shown, now - bar.told_at >= _REDRAW
            if bar.is_told:
                bar.told_at = now
                lines.append(shown)
        return lines

    def _behind_rank(self, rank: int, lines: list[str]) -> str:
        if not lines:
            return ""
        prefix = time.strftime(self._time) + ("sparkdist: " if rank == OURS else f"[rank {rank}] ")
        return prefix + safe("\n".join(lines)).replace("\n", "\n" + prefix) + "\n"


def _last_drawn(line: str) -> str:
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")


def safe(text: str) -> str:
    """Shows control and format characters instead of obeying them."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return _ODD.sub(lambda odd: odd[0] if odd[0].isprintable() else "".join(map(_shown, odd[0])), text)


@cache
def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # wide and narrow spaces
        return character
    return character.encode("unicode_escape").decode()
