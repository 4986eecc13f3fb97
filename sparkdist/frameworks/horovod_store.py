"""The rendezvous of Horovod's ranks: values by key, over HTTP.

Protocol: `horovod/common/gloo/http_store.cc`: PUT, GET and DELETE of /SCOPE/KEY. A GET of what is not
there yet is answered with 404, and asked again. Nobody authenticates: gloo, which the values are
for, has no secret either.
"""

from __future__ import annotations

import socket
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
        self.values: dict[str, bytes] = {}


class _Handler(BaseHTTPRequestHandler):
    server: Store
    timeout = _REQUEST_TIME

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _VALUE_LIMIT:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        self.server.values[self.path] = self.rfile.read(int(length))
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        """Does nothing: a rank says that it has ended, and others may not have read all it left."""
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Says nothing of requests."""
