"""The agent's end of the control channel: frames to and from the driver, never in the agent's way."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import deque
from collections.abc import Iterator

from sparkdist import wire
from sparkdist.executor.order import Order

_CONNECT_TIMEOUT = 5.0  # s
_FLUSH_TIMEOUT = 30.0  # s that the driver may take to read what is left at the end
_LOG_BUFFER = 16 << 20  # bytes of lines that wait for a driver that reads too slowly


def dial(order: Order) -> socket.socket | None:
    """Connects to the driver and proves membership of the run; None where nobody answers."""
    if order.control is None:
        return None
    try:
        sock = socket.create_connection(order.control, timeout=_CONNECT_TIMEOUT)
    except OSError:
        return None
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.prove_as_client(sock, bytes.fromhex(order.token))
    except OSError:
        sock.close()
        return None
    return sock


class Link:
    """A connection to the driver that buffers what it cannot send at once.

    Attributes:
        sock: The socket, or None where the driver never answered.
        up: Whether the driver can be reached.

    Where the driver cannot be reached everything still works: frames are dropped, logs are lost
    but for each rank's last lines, and outcomes travel as rows.
    """

    def __init__(self, sock: socket.socket | None) -> None:
        self.sock = sock
        self.up = sock is not None
        self._frames = wire.FrameReader(max_body=0)
        self._out: deque[memoryview] = deque()
        self._waiting = 0  # bytes in _out
        self._dropped = 0  # bytes of logs not sent
        if sock:
            sock.setblocking(False)

    @property
    def pending(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._out)

    def send(self, header: wire.Header, body: bytes = b"") -> None:
        """Sends a frame now or as soon as the driver reads on."""
        if not self.up:
            return
        data = wire.pack(header, len(body)) + body
        self._out.append(memoryview(data))
        self._waiting += len(data)
        self.push()

    def send_log(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Sends lines, or counts them as dropped where too many wait already."""
        if self._waiting > _LOG_BUFFER:
            self._dropped += len(data)
            return
        if self._dropped:
            notice = f"... {self._dropped} bytes of output dropped: the driver reads too slowly\n"
            self._dropped = 0
            data = notice.encode() + data
        self.send({"kind": "log", "rank": rank, "stderr": is_stderr}, data)

    def push(self) -> None:
        """Sends what the socket takes without waiting."""
        while self._out and self.sock:
            try:
                sent = self.sock.send(self._out[0])
            except BlockingIOError:
                return
            except OSError:
                self._lose()
                return
            self._waiting -= sent
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

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
            self.sock.sendall(wire.pack({"kind": "outcome", "rank": rank}, size))
            offset = 0
            while offset < size:
                piece = os.pread(fd, 1 << 20, offset)
                digest.update(piece)
                self.sock.sendall(piece)
                offset += len(piece)
        except OSError:
            self._lose()
            return None
        return digest.hexdigest()

    def close(self) -> None:
        """Sends what is left and closes."""
        self._flush()
        if self.sock:
            self.sock.close()

    def _flush(self) -> bool:
        if self.sock and self.up:
            self.sock.settimeout(_FLUSH_TIMEOUT)
            try:
                while self._out:
                    self.sock.sendall(self._out.popleft())
            except OSError:
                self._lose()
        return self.up

    def _lose(self) -> None:
        self.up = False
        self._out.clear()
        self._waiting = 0
