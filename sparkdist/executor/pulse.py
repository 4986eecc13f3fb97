"""Whether the ranks of a node do anything, seen from outside: by CPU time, I/O and output.

A rank that waits is not quite still: each gloo group has a thread that wakes up a hundred times a
second, and takes 0.2 % of a core. So CPU time is let run out at a small rate, and only more counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sparkdist import wire
from sparkdist.executor import process
from sparkdist.executor.ranks import Rank

_IDLE = 0.01  # s of CPU time per s that a rank may take and yet do nothing
_BURST = 0.025  # s of it beyond that which are a sign of life; the kernel counts in hundredths
_STILL = "TtD"  # states in which a rank does nothing, whatever processes below it do
_READY = "R"  # the state in which it does something, or would if the machine had time for it


class Pulse:
    """Looks at ranks from the moment they enter the user's code until they leave it.

    Args:
        limit: Seconds without a sign of life after which a rank is silent; None to look at nothing.
        send: Gets the news: which rank is silent, or moves again.
    """

    def __init__(self, limit: float | None, send: Callable[[wire.Header], None]) -> None:
        self._limit = limit or 0.0
        self._send = send
        self._period = min(1.0, self._limit / 10)  # s
        self._next = 0.0
        self._lives: dict[int, _Life] = {}
        self._spoilt = False

    @property
    def pause(self) -> float | None:
        """Seconds until it wants to look again."""
        return max(0.0, self._next - time.monotonic()) if self._limit else None

    def beat(self, ranks: Iterable[Rank], disturbed: bool) -> None:
        """Looks at the ranks if it is time to.

        Args:
            ranks: Those that live.
            disturbed: Whether they are just asked for their stacks or to end: what they do then is no
                sign of life.
        """
        now = time.monotonic()
        self._spoilt = self._spoilt or disturbed
        if not self._limit or disturbed or now < self._next:
            return
        self._next = now + self._period
        for rank in ranks:
            if rank.entered and rank.left is None:
                try:
                    self._look(rank, now)
                except OSError:
                    pass  # it has just ended
        self._spoilt = False

    def _look(self, rank: Rank, now: float) -> None:
        life = self._lives.get(rank.rank)
        if life is None or life.pid != rank.pid:
            life = self._lives[rank.rank] = _Life(rank.pid, now)
        heard, rank.heard = rank.heard, False
        # Reading /proc for what is below a rank takes long, and most ranks move by themselves.
        if life.look(now, heard, self._spoilt, below=now - life.moved_at > self._limit / 2):
            life.moved_at = now
        silence = now - life.moved_at
        is_silent = silence >= self._limit
        if is_silent and not rank.silent:
            self._send(
                {"kind": "silent", "rank": rank.rank, "for": silence, "state": process.state(rank.pid)}
            )
        elif rank.silent and not is_silent:
            self._send({"kind": "moving", "rank": rank.rank})
        rank.silent = is_silent
        if is_silent:
            rank.runs = process.runs(rank.pid)


class _Life:
    """What was last seen of a rank's process and, where it was looked for, of those below it."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.moved_at = now
        self._last = {pid: process.usage(pid)}
        self._last_at = now
        self._excess = 0.0  # s of CPU time that have not run out

    def look(self, now: float, heard: bool, spoilt: bool, below: bool) -> bool:
        """Says whether there was a sign of life since the last look.

        Args:
            now: The time.
            heard: Whether it printed something.
            spoilt: Whether its I/O has to be left out.
            below: Whether to look at the processes below it too.
        """
        last, before = self._last, self._last_at
        self._last, self._last_at = {self.pid: process.usage(self.pid)}, now
        state = self._last[self.pid].state
        is_still = state in _STILL
        if below and not is_still:
            self._last |= process.usages(process.descendants(self.pid))
        both = self._last.keys() & last.keys()
        self._excess += sum(self._last[pid].cpu - last[pid].cpu for pid in both) - _IDLE * (now - before)
        self._excess = max(0.0, self._excess)
        moved = state in _READY or self._excess > _BURST
        moved |= not spoilt and any(self._last[pid].io != last[pid].io for pid in both)
        # That processes came or went can be told where they were looked for both times.
        moved |= not is_still and (
            heard or (len(self._last) > 1 < len(last) and self._last.keys() != last.keys())
        )
        if moved:
            self._excess = 0.0
        return moved
