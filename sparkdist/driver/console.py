"""Ranks' output on the driver's stdout and stderr."""

from __future__ import annotations

import re
import sys
import threading

_LINE_END = re.compile(r"[\r\n]+")


class Console:
    """Prints ranks' lines, each behind its rank, whole even where threads print at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Prints lines of one rank: its stdout to stdout, its stderr to stderr."""
        lines = [line for line in _LINE_END.split(data.decode(errors="backslashreplace")) if line]
        text = "".join(f"[rank {rank}] {_safe(line)}\n" for line in lines)
        with self._lock:
            stream = sys.stderr if is_stderr else sys.stdout
            try:
                stream.write(text)
                stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads the driver's output any more; the training goes on


def _safe(line: str) -> str:
    """Shows control characters instead of obeying them."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)
