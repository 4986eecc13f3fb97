"""Asking a node's ranks where they stand: each prints its Python stacks into a file of its agent's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from sparkdist import wire
from sparkdist.executor.ranks import STACK_SIGNAL, Rank

_TIME = 1.0  # s that ranks get to print them


class Stacks:
    """One question after another.

    Attributes:
        is_asking: Whether ranks are just asked.
    """

    def __init__(self) -> None:
        self.is_asking = False
        self._until = 0.0
        self._asked: list[Rank] = []
        self._asleep: list[int] = []  # those that slept until they were asked

    def ask(self, ranks: Iterable[Rank]) -> None:
        """Asks ranks to print their stacks, first forgetting what was printed before."""
        self.is_asking, self._until = True, time.monotonic() + _TIME
        self._asked, self._asleep = list(ranks), []
        for rank in self._asked:
            if rank.is_fast_asleep():
                self._asleep.append(rank.rank)
            os.truncate(rank.pipes.stacks, 0)
            os.lseek(rank.pipes.stacks, 0, os.SEEK_SET)
            rank.stacks_seen = -1
            rank.signal(STACK_SIGNAL)

    def are_due(self) -> bool:
        """Says whether ranks were asked and have answered, or had their time."""
        return self.is_asking and (self._are_printed() or time.monotonic() > self._until)

    def _are_printed(self) -> bool:
        """Says whether every rank that was asked has ended or printed, and nothing since the last call."""
        done = True
        for rank in self._asked:
            size = rank.stacks_size()
            done = done and size == rank.stacks_seen and (size > 0 or not rank.alive)
            rank.stacks_seen = size
        return done

    def take(self) -> wire.Header:
        """Returns what ranks have printed since they were asked, or what /proc says of them, as news."""
        self.is_asking = False
        said = {rank.rank: rank.read_stacks() for rank in self._asked if rank.alive or rank.stacks_size()}
        return {"kind": "stacks", "stacks": said, "asleep": self._asleep}
