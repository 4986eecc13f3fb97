"""The rendezvous of Horovod's ranks, over real HTTP."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from sparkdist.frameworks.horovod_store import Store


@pytest.fixture
def port() -> Iterator[int]:
    store = Store(socket.create_server(("127.0.0.1", 0)))
    thread = threading.Thread(target=store.serve_forever, args=(0.01,))
    thread.start()
    yield store.server_address[1]
    store.shutdown()
    store.server_close()
    thread.join()


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_a_value_is_what_was_put_and_until_then_not_found(port):
    assert ask(port, "GET", "/global/0") == (404, b"")
    assert ask(port, "PUT", "/global/0", b"\0\xffaddress") == (200, b"")
    assert ask(port, "GET", "/global/0") == (200, b"\0\xffaddress")
    assert ask(port, "GET", "/local/0") == (404, b"")
    assert ask(port, "PUT", "/global/0", b"") == (200, b"")
    assert ask(port, "GET", "/global/0") == (200, b"")


def test_ranks_values_go_when_all_of_them_have_deleted_theirs(port):
    for key in ("0", "rank_0", "1", "rank_1"):
        ask(port, "PUT", f"/global/{key}", b"x")
    assert ask(port, "DELETE", "/global/0") == (200, b"")
    assert ask(port, "GET", "/global/0") == (200, b"x")  # rank 1 may not have read it yet
    ask(port, "DELETE", "/global/1")
    for key in ("0", "rank_0", "1", "rank_1"):
        assert ask(port, "GET", f"/global/{key}") == (404, b"")


def test_what_is_no_ranks_goes_at_once(port):
    ask(port, "PUT", "/mine/key", b"x")
    ask(port, "PUT", "/mine/0", b"x")
    ask(port, "DELETE", "/mine/key")
    assert ask(port, "GET", "/mine/key") == (404, b"") and ask(port, "GET", "/mine/0") == (200, b"x")


@pytest.mark.parametrize("length", ["many", "-1", str(1 << 40)])
def test_a_length_that_is_none_or_too_large_is_refused(port, length):
    assert ask(port, "PUT", "/global/0", b"", **{"Content-Length": length}) == (400, b"")
    assert ask(port, "GET", "/global/0") == (404, b"")


def test_many_ranks_at_once(port):
    def meet(rank: int) -> None:
        ask(port, "PUT", f"/global/{rank}", b"%d" % rank)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ask(port, "GET", f"/global/{rank}") for rank in range(40)] == [
        (200, b"%d" % rank) for rank in range(40)
    ]
