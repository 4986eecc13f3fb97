"""Bytes between our own processes: frames, mutual authentication, and the limits on both.

A frame is a JSON object and an optional body of bytes, each behind its length. Nothing here
unpickles. A peer proves that it knows the run's token before any length it sends is believed.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

Header = dict[str, Any]
Frame = tuple[Header, bytearray]

MAX_HEADER = 32 << 20  # bytes; a header may carry a traceback and a rank's last lines
TEXT_LIMIT = 1 << 19  # characters of a message or traceback; JSON may need 12 bytes for one
ROW_LIMIT = 16 << 20  # bytes of one rank's outcome that travel as a Spark row
LOGS_LIMIT = 64 << 20  # bytes of a gang's lines that travel as rows where the driver cannot be reached
HANDSHAKE_TIMEOUT = 10.0  # s
GRACE = 3.0  # s that ranks get between SIGTERM and SIGKILL

_LENGTHS = struct.Struct("!IQ")
_NONCE = 32
_MAC = hashlib.sha256().digest_size


class WireError(OSError):
    """The peer broke the protocol, could not prove who it is, or sent too much."""


def bind(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """Returns a TCP socket bound to an address of this host, at any port or at a free one of a range.

    Raises:
        OSError: There is no such address, or no port of the range is free.
    """
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        sock = socket.socket(family)
        try:
            # So that a port is free again at once when its run is over.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(socket.SOMAXCONN)  # two sockets may be bound to a port, but only one may listen
            return sock
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port of {first}-{last} is free at {address}")


def tune(sock: socket.socket) -> None:
    """Has small frames leave at once, and the end of a host be noticed in a minute though nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def pack(header: Header, body_size: int = 0) -> bytes:
    """Returns the bytes of a frame up to its body, which follows with `body_size` bytes.

    Raises:
        WireError: Its header is larger than a receiver takes.
    """
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER:
        raise WireError(f"a header of {len(text)} bytes is over the limit")
    return _LENGTHS.pack(len(text), body_size) + text


def cut(text: str) -> str:
    """Keeps the ends of a text that is too long for a header."""
    half = TEXT_LIMIT // 2
    return text if len(text) <= TEXT_LIMIT else f"{text[:half]}\n...\n{text[-half:]}"


def send(sock: socket.socket, header: Header, body: bytes | bytearray | memoryview = b"") -> None:
    """Sends one frame on a blocking socket."""
    sock.sendall(pack(header, len(body)))
    if body:
        sock.sendall(body)


def receive(sock: socket.socket, max_body: int) -> Frame | None:
    """Reads one frame from a blocking socket; None at an end of file between frames.

    Raises:
        WireError: The frame is larger than allowed, or the stream ends inside it.
    """
    head = _read(sock, _LENGTHS.size, start=True)
    if head is None:
        return None
    text_size, body_size = _check(head, max_body)
    text = _read(sock, text_size)
    body = _read(sock, body_size)
    assert text is not None and body is not None
    return json.loads(text), body


class FrameReader:
    """Cuts a stream that arrives in pieces into frames, for non-blocking readers."""

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that `data` completes.

        Raises:
            WireError: A frame is larger than allowed.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            text_size, body_size = _check(self._buffer[: _LENGTHS.size], self._max_body)
            body_start = _LENGTHS.size + text_size
            end = body_start + body_size
            if len(self._buffer) < end:
                return
            header = json.loads(self._buffer[_LENGTHS.size : body_start])
            body = self._buffer[body_start:end]
            del self._buffer[:end]
            yield header, body


def prove_as_server(sock: socket.socket, token: bytes) -> None:
    """Authenticates both ends from the listening side.

    Raises:
        WireError: The client does not know the token.
    """
    with _Handshake(sock) as peer:
        theirs = peer.read(_NONCE)
        ours = os.urandom(_NONCE)
        sock.sendall(ours + _mac(token, b"server", theirs, ours))
        if not hmac.compare_digest(peer.read(_MAC), _mac(token, b"client", ours, theirs)):
            raise WireError("the client does not know this run's token")


def prove_as_client(sock: socket.socket, token: bytes) -> None:
    """Authenticates both ends from the connecting side.

    Raises:
        WireError: The server does not know the token.
    """
    with _Handshake(sock) as peer:
        ours = os.urandom(_NONCE)
        sock.sendall(ours)
        answer = peer.read(_NONCE + _MAC)
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _mac(token, b"server", ours, theirs)):
            raise WireError("the server does not know this run's token")
        sock.sendall(_mac(token, b"client", theirs, ours))


class _Handshake:
    """Bounds a handshake in time, however its bytes trickle, then makes the socket blocking again."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT

    def __enter__(self) -> _Handshake:
        self._sock.settimeout(HANDSHAKE_TIMEOUT)
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.settimeout(None)

    def read(self, size: int) -> bytes:
        """Reads so many bytes.

        Raises:
            WireError: The peer closed the connection.
            TimeoutError: They did not come in time.
        """
        data = b""
        while len(data) < size:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the handshake took too long")
            self._sock.settimeout(left)
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise WireError("the peer closed the connection in the handshake")
            data += piece
        return data


def _mac(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token, role + first + second, "sha256")


def _check(head: bytes | bytearray, max_body: int) -> tuple[int, int]:
    text_size, body_size = _LENGTHS.unpack(head)
    if text_size > MAX_HEADER or body_size > max_body:
        raise WireError(f"a frame of {text_size} + {body_size} bytes is over the limit")
    return text_size, body_size


def _read(sock: socket.socket, size: int, start: bool = False) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    got = 0
    while got < size:
        count = sock.recv_into(view[got:])
        if count == 0:
            if start and got == 0:
                return None
            raise WireError("the peer closed the connection in the middle of a frame")
        got += count
    return data
