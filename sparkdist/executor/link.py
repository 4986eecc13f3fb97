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
        sock: The socket, or None where the driver never answered.
        up: Whether the driver can be reached.
        logs: Lines that wait to be sent; news goes first.
        records: What ranks said through Python's logging and waits to be sent, as lines of JSON.
    """

    def __init__(self, sock: socket.socket | None) -> None:
        self.sock = sock
        self.up = sock is not None
        self.logs = Backlog()
        self.records = Backlog()
        self._frames = wire.FrameReader(max_body=0)
        self._news: deque[bytes] = deque()
        self._leaving = memoryview(b"")  # what is left of a frame that the socket took a part of
        self._piece: Piece | None = None  # the lines in it
        self._source = self.logs  # where these come from
        if sock:
            sock.setblocking(False)

    @property
    def pending(self) -> bool:
        """Whether bytes wait to be sent."""
        return self.up and bool(self._leaving or self._news or self.records or self.logs)

    def send(self, header: wire.Header) -> None:
        """Sends news now or as soon as the driver reads on."""
        if self.up:
            self._news.append(wire.pack(header))
            self.push()

    def send_log(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Sends lines now or as soon as the driver reads on."""
        self.logs.add(rank, is_stderr, data)
        self.push()

    def send_record(self, rank: int, record: wire.Header) -> None:
        """Sends a record of Python's logging now or as soon as the driver reads on."""
        self.records.add(rank, False, json.dumps(record).encode() + b"\n")
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
            self._source = self.logs if self.logs else self.records
            (self._piece,) = self._source.take(1)
            header, data = self._as_frame(self._piece, self._source)
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
        for source in (self.logs, self.records):
            source.shorten(limit)
            streams: dict[tuple[int, bool], bytearray] = {}
            dropped: Counter[tuple[int, bool]] = Counter()
            for piece in (*source.take(sys.maxsize), *source.take_dropped()):
                header, data = self._as_frame(piece, source)
                dropped[piece.rank, piece.is_stderr] += header.get("dropped", 0)
                streams.setdefault((piece.rank, piece.is_stderr), bytearray()).extend(data)
            for (rank, is_stderr), said in streams.items():
                yield self._as_frame(Piece(rank, is_stderr, said, dropped[rank, is_stderr]), source)

    def _as_frame(self, piece: Piece, source: Backlog) -> tuple[wire.Header, bytes]:
        if source is self.records:
            notice = json.dumps({"dropped": piece.dropped}).encode() + b"\n" if piece.dropped else b""
            return {"kind": "record", "rank": piece.rank}, notice + piece.data
        # A number, not a line: the driver may have to drop it, and adds up what it drops.
        header = {"kind": "log", "rank": piece.rank, "stderr": piece.is_stderr, "dropped": piece.dropped}
        return header, bytes(piece.data)

    def close(self) -> None:
        """Sends what is left, as long as the driver reads, and closes when it has read all."""
        self._flush()
        for piece in self.logs.take_dropped():  # that no line has followed
            self.logs.add(piece.rank, piece.is_stderr, b"", piece.dropped)
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
            self._source.put_back(self._piece)
        self._leaving = memoryview(b"")
