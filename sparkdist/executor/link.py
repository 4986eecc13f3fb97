"""The agent's end of the control channel: frames to and from the driver, never in the agent's way."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterator

from sparkdist import wire
from sparkdist.executor.backlog import Backlog, Piece
from sparkdist.executor.order import Order

_CONNECT_TIMEOUT = 5.0  # s
_FLUSH_TIMEOUT = 10.0  # s without any progress until a driver that reads nothing is given up
_OUTCOME_TIMEOUT = 60.0  # s, the same, for what cannot reach it otherwise


def dial(order: Order) -> socket.socket | None:
    """Connects to the driver and proves membership of the run; None where nobody answers."""
    if order.control is None:
        return None
    try:
        sock = socket.create_connection(order.control, timeout=_CONNECT_TIMEOUT)
    except OSError:
        return None
    try:
        wire.tune(sock)
        wire.prove_as_client(sock, bytes.fromhex(order.token))
    except OSError:
        sock.close()
        return None
    return sock


class Link:
    """A connection to the driver that keeps what it cannot send at once.

    Where the driver cannot be reached, or no longer, everything still works: news is dropped, and
    lines and outcomes travel as rows.

    Attributes:
        sock: The socket, or None where the driver never answered, or all is said.
        up: Whether the driver can be reached.
        waiting: What ranks said and waits to be sent, by its kind, the most urgent first: reports,
            lines, and records of Python's logging. News goes before all of it.
    """

    def __init__(self, sock: socket.socket | None) -> None:
        self.sock = sock
        self.up = sock is not None
        self.waiting = {"report": Backlog(), "log": Backlog(), "record": Backlog()}
        self._frames = wire.FrameReader(max_body=0)
        self._news: deque[bytes] = deque()
        self._leaving = memoryview(b"")  # what is left of a frame that the socket took a part of
        self._piece: tuple[str, Piece] | None = None  # the kind of the lines in it, and these
        if sock:
            sock.setblocking(False)

    @property
    def pending(self) -> bool:
        """Whether bytes wait to be sent."""
        return self.up and bool(self._leaving or self._news or any(self.waiting.values()))

    def send(self, header: wire.Header) -> None:
        """Sends news now or as soon as the driver reads on."""
        if self.up:
            self._news.append(wire.pack(header))
            self.push()

    def send_log(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Sends lines now or as soon as the driver reads on."""
        self.waiting["log"].add(rank, is_stderr, data)
        self.push()

    def send_data(self, kind: str, rank: int, data: wire.Header | str) -> None:
        """Sends what a rank told, now or as soon as the driver reads on.

        Args:
            kind: `"report"` or `"record"`, which travel as a line of JSON, or `"said"`: text among the
                rank's lines, whether these are wanted or not.
            rank: The rank.
            data: What it told.
        """
        if kind == "said":
            self.send_log(rank, False, str(data).encode(errors="backslashreplace") + b"\n")
            return
        self.waiting[kind].add(rank, False, json.dumps(data).encode() + b"\n")
        self.push()

    def push(self) -> None:
        """Sends what the socket takes without waiting."""
        while self.pending and self.sock:
            self._load()
            try:
                sent = self.sock.send(self._leaving)
            except BlockingIOError:
                return
            except OSError:
                self._lose()
                return
            self._leaving = self._leaving[sent:]

    def _load(self) -> None:
        """Makes the next frame the one that is leaving, if the last one has left."""
        if self._leaving:
            return
        self._piece = None
        if self._news:
            self._leaving = memoryview(self._news.popleft())
        else:
            kind, source = next(item for item in self.waiting.items() if item[1])
            (piece,) = source.take(1)
            self._piece = kind, piece
            header, data = _as_frame(kind, piece)
            self._leaving = memoryview(wire.pack(header, len(data)) + data)

    def receive(self) -> Iterator[wire.Header]:
        """Yields what the driver has sent; the driver's end of the connection is noticed here."""
        if not self.sock or not self.up:
            return
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        for header, _ in self._frames.feed(data):
            yield header

    def send_outcome(self, rank: int, fd: int, size: int) -> str | None:
        """Streams an outcome from a file, waiting for the driver.

        Returns:
            Its SHA-256 in hex, or None if the driver cannot be reached.
        """
        if not self._flush():
            return None
        assert self.sock
        digest = hashlib.sha256()
        try:
            self.sock.settimeout(_OUTCOME_TIMEOUT)
            self.sock.sendall(wire.pack({"kind": "outcome", "rank": rank}, size))
            offset = 0
            while offset < size:
                piece = os.pread(fd, 1 << 20, offset)
                digest.update(piece)
                offset += len(piece)
                while piece:
                    piece = piece[self.sock.send(piece) :]
            self.sock.setblocking(False)
        except OSError:
            self._lose()
            return None
        return digest.hexdigest()

    def left_over(self, limit: int) -> Iterator[tuple[wire.Header, bytes]]:
        """Takes what the driver has not got, so many bytes of each rank, as frames: one for each stream."""
        for kind, source in self.waiting.items():
            source.shorten(limit)
            streams: dict[tuple[int, bool], bytearray] = {}
            dropped: Counter[tuple[int, bool]] = Counter()
            for piece in (*source.take(sys.maxsize), *source.take_dropped()):
                header, data = _as_frame(kind, piece)
                dropped[piece.rank, piece.is_stderr] += header.get("dropped", 0)
                streams.setdefault((piece.rank, piece.is_stderr), bytearray()).extend(data)
            for (rank, is_stderr), said in streams.items():
                yield _as_frame(kind, Piece(rank, is_stderr, said, dropped[rank, is_stderr]))

    def close(self) -> None:
        """Sends what is left, as long as the driver reads, and closes when it has read all."""
        self._flush()
        logs = self.waiting["log"]
        for piece in logs.take_dropped():  # that no line has followed
            logs.add(piece.rank, piece.is_stderr, b"", piece.dropped)
        self._flush()
        self.send({"kind": "bye"})
        if self._flush() and self.sock:
            self.sock.settimeout(_FLUSH_TIMEOUT)
            try:
                self.sock.shutdown(socket.SHUT_WR)
                # A word of the driver's to a closed socket would have its kernel drop what it has not read.
                while self.sock.recv(1 << 16):
                    pass
            except OSError:
                self._lose()
        if self.sock:
            self.sock.close()
            self.sock = None

    def _flush(self) -> bool:
        """Says whether the driver has taken all there was; it gets some time for every frame."""
        if self.sock and self.up:
            self.sock.settimeout(_FLUSH_TIMEOUT)
            self.push()
            self.sock.setblocking(False)
        return self.up

    def _lose(self) -> None:
        self.up = False
        self._news.clear()
        if self._leaving and self._piece:
            kind, piece = self._piece
            self.waiting[kind].put_back(piece)
        self._leaving = memoryview(b"")


def _as_frame(kind: str, piece: Piece) -> tuple[wire.Header, bytes]:
    if kind != "log":
        notice = json.dumps({"dropped": piece.dropped}).encode() + b"\n" if piece.dropped else b""
        return {"kind": kind, "rank": piece.rank}, notice + piece.data
    # A number, not a line: the driver may have to drop it, and adds up what it drops.
    header = {"kind": kind, "rank": piece.rank, "stderr": piece.is_stderr, "dropped": piece.dropped}
    return header, bytes(piece.data)
