"""Ranks' lines that wait for a reader: in their order of arrival, and a bounded amount of each rank's.

An agent keeps them for a driver that reads slowly or not at all, the driver for whoever reads its output.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass

LIMIT = 16 << 20  # bytes of one rank's lines
_PIECE = 1 << 16  # bytes up to which what comes from one stream without a break is one piece
_OVERHEAD = 128  # bytes that a piece takes besides its lines


@dataclass
class Piece:
    """Whole lines of one stream of a rank.

    Attributes:
        rank: The rank.
        is_stderr: Whether they come from its stderr.
        data: The lines.
        dropped: How many lines of this stream were dropped before these.
    """

    rank: int
    is_stderr: bool
    data: bytearray
    dropped: int = 0


class Backlog:
    """A queue that never refuses; where a rank has too much in it, that rank's oldest lines go."""

    def __init__(self) -> None:
        self._limit = LIMIT
        self._numbers = itertools.count()
        self._pieces: OrderedDict[int, Piece] = OrderedDict()  # by number; any may go at no cost
        self._of_rank: defaultdict[int, deque[int]] = defaultdict(deque)
        self._sizes: Counter[int] = Counter()
        self._dropped: Counter[tuple[int, bool]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, rank: int, is_stderr: bool, data: bytes, dropped: int = 0) -> None:
        """Adds lines, before which so many of this stream were dropped elsewhere."""
        last = self._pieces[next(reversed(self._pieces))] if self._pieces else None
        if (
            last
            and not dropped
            and (last.rank, last.is_stderr) == (rank, is_stderr)
            and len(last.data) < _PIECE
        ):
            last.data += data
            self._sizes[rank] += len(data)
        else:
            number = next(self._numbers)
            self._pieces[number] = Piece(rank, is_stderr, bytearray(data), dropped)
            self._of_rank[rank].append(number)
            self._sizes[rank] += len(data) + _OVERHEAD
        self._shorten(rank)

    def shorten(self, limit: int) -> None:
        """Lowers the limit."""
        self._limit = min(limit, self._limit)
        for rank in self._of_rank:
            self._shorten(rank)

    def _shorten(self, rank: int) -> None:
        """Drops the oldest lines of a rank."""
        while (excess := self._sizes[rank] - self._limit) > 0:
            number = self._of_rank[rank][0]
            piece = self._pieces[number]
            end = piece.data.find(b"\n", excess - 1) + 1 or len(piece.data)
            self._dropped[rank, piece.is_stderr] += piece.data.count(b"\n", 0, end)
            if end == len(piece.data):
                self._dropped[rank, piece.is_stderr] += self._remove(number).dropped
            else:
                del piece.data[:end]
                self._sizes[rank] -= end

    def _remove(self, number: int) -> Piece:
        piece = self._pieces.pop(number)
        self._of_rank[piece.rank].popleft()
        self._sizes[piece.rank] -= len(piece.data) + _OVERHEAD
        return piece

    def take(self, size: int) -> list[Piece]:
        """Removes and returns the oldest pieces, up to the one that makes them `size` bytes."""
        taken: list[Piece] = []
        while self._pieces and size > 0:
            piece = self._remove(next(iter(self._pieces)))
            piece.dropped += self._dropped.pop((piece.rank, piece.is_stderr), 0)
            size -= len(piece.data)
            taken.append(piece)
        return taken

    def put_back(self, piece: Piece) -> None:
        """Takes a piece again that was taken last."""
        number = min(self._pieces, default=0) - 1
        self._pieces[number] = piece
        self._pieces.move_to_end(number, last=False)
        self._of_rank[piece.rank].appendleft(number)
        self._sizes[piece.rank] += len(piece.data) + _OVERHEAD
        self._shorten(piece.rank)

    def take_dropped(self) -> list[Piece]:
        """Returns empty pieces for the lines that were dropped and that no others have followed."""
        dropped, self._dropped = self._dropped, Counter()
        return [Piece(*stream, bytearray(), count) for stream, count in dropped.items()]

    def lines(self) -> int:
        """Returns how many lines wait, or were dropped and not told of."""
        waiting = sum(piece.data.count(b"\n") + piece.dropped for piece in self._pieces.values())
        return waiting + self._dropped.total()
