"""Whether the ranks of a node do anything, seen from outside: by CPU time, I/O and output.

A rank that waits is not quite still: each gloo group has a thread that wakes up a hundred times a
second, and takes 0.2 % of a core. So CPU time is let run out at a small rate, and only more counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache

from sparkdist import wire
from sparkdist.executor import process
from sparkdist.executor.ranks import Rank

_IDLE = 0.01  # s of CPU time per s that a rank may take and yet do nothing
_BURST = 0.025  # s of it beyond that which are a sign of life; the kernel counts in hundredths
_ABSENCE = 1.0  # s later than it wanted to that an agent looks again if it was only busy
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
        self._next_below = 0.0
        self._called_at = 0.0
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
        self._leave_out_absence(now)
        self._spoilt = self._spoilt or disturbed
        if not self._limit or disturbed or now < self._next:
            return
        self._next = now + self._period
        tree = None
        if now >= self._next_below:
            self._next_below = now + self._limit / 10
            tree = cache(process.children)
        for rank in ranks:
            if rank.entered and rank.left is None:
                try:
                    self._look(rank, now, tree)
                except OSError:
                    pass  # it has just ended
        self._spoilt = False

    def _leave_out_absence(self, now: float) -> None:
        """Does not take for silence what nobody listened to: a container may be paused, agent and ranks."""
        absence, self._called_at = now - self._called_at, now
        if absence > self._period + _ABSENCE:
            for life in self._lives.values():
                life.moved_at += absence
                life.asleep_since += absence

    def _look(self, rank: Rank, now: float, tree: Callable[[], dict[int, list[int]]] | None) -> None:
        life = self._lives.get(rank.rank)
        if life is None or life.pid != rank.pid:
            life = self._lives[rank.rank] = _Life(rank.pid, now)
        heard, rank.heard = rank.heard, False
        below = None
        # To read all of /proc takes long, and most ranks move by themselves.
        if tree and now - life.moved_at > self._limit / 2:
            below = process.descendants(rank.pid, tree())
        if life.look(now, heard, self._spoilt, below):
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
        rank.runs = life.runs if now - life.asleep_since >= self._limit / 2 else -1


class _Life:
    """What was last seen of a rank's process and, since it moved, of those below it.

    Attributes:
        pid: The process.
        moved_at: When it last gave a sign of life.
        runs: How often its main thread had run at the last look.
        asleep_since: From when on that number is the same.
    """

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.moved_at = self.asleep_since = now
        self.runs = -1
        self._last = {pid: process.usage(pid)}
        self._last_at = now
        self._below: list[int] | None = None
        self._excess = 0.0  # s of CPU time that have not run out

    def look(self, now: float, heard: bool, spoilt: bool, below: list[int] | None) -> bool:
        """Says whether there was a sign of life since the last look.

        Args:
            now: The time.
            heard: Whether it printed something.
            spoilt: Whether I/O has to be left out.
            below: The processes below it, if they are to be looked at too.
        """
        self._count_runs(now)
        seen = {self.pid: process.usage(self.pid)}
        state = seen[self.pid].state
        is_still = state in _STILL
        if below is not None and not is_still:
            seen |= process.usages(below)
        both = seen.keys() & self._last.keys()
        cpu = sum(seen[pid].cpu - self._last[pid].cpu for pid in both)
        self._excess = max(0.0, self._excess + cpu - _IDLE * (now - self._last_at))
        moved = state in _READY or self._excess > _BURST
        moved |= not spoilt and any(seen[pid].io != self._last[pid].io for pid in both)
        moved |= not is_still and (heard or (None not in (below, self._below) and below != self._below))
        self._last_at = now
        if moved:
            self._excess, self._below = 0.0, None
            self._last = {self.pid: seen[self.pid]}
        else:
            self._below = self._below if below is None else below
            self._last |= seen
        return moved

    def _count_runs(self, now: float) -> None:
        runs = process.runs(self.pid)
        if runs != self.runs:
            self.runs, self.asleep_since = runs, now
