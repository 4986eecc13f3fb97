"""The rendezvous of Horovod's ranks: values by key, over HTTP.

Protocol: `horovod/common/gloo/http_store.cc`: PUT, GET and DELETE of /SCOPE/KEY. A GET of what is not
there yet is answered with 404, and asked again. A rank that has met all others deletes its own key,
and when all have, the scope is empty for another `hvd.init()`. Nobody authenticates: gloo, which the
values are for, has no secret either.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_VALUE_LIMIT = 16 << 20  # bytes
_REQUEST_TIME = 10.0  # s that one request may take


class Store(ThreadingHTTPServer):
    """Serves on a socket that already listens.

    Args:
        listener: The socket.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._scopes: dict[str, _Scope] = {}
        self._lock = threading.Lock()

    @contextmanager
    def scope(self, name: str) -> Iterator[_Scope]:
        """Gives one thread at a time the values of a scope."""
        with self._lock:
            yield self._scopes.setdefault(name, _Scope())


@dataclass
class _Scope:
    values: dict[str, bytes] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)

    def delete(self, key: str) -> None:
        """Deletes a value; that of a rank with all others, once each rank has asked for it."""
        if not key.isdecimal():
            self.values.pop(key, None)
            return
        self.deleted.add(key)  # others may not have read it yet
        if self.deleted >= set(filter(str.isdecimal, self.values)):
            self.values.clear()
            self.deleted.clear()


class _Handler(BaseHTTPRequestHandler):
    server: Store
    timeout = _REQUEST_TIME

    def do_GET(self) -> None:
        with self._scope() as (scope, key):
            value = scope.values.get(key)
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _VALUE_LIMIT:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        value = self.rfile.read(int(length))
        with self._scope() as (scope, key):
            scope.values[key] = value
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        with self._scope() as (scope, key):
            scope.delete(key)
        self._answer(HTTPStatus.OK)

    @contextmanager
    def _scope(self) -> Iterator[tuple[_Scope, str]]:
        name, _, key = self.path.removeprefix("/").partition("/")
        with self.server.scope(name) as scope:
            yield scope, key

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Says nothing of requests."""
