"""The agent's end of the control channel, over real sockets: what waits, is dropped, is left over."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from sparkdist import wire
from sparkdist.executor.backlog import LIMIT
from sparkdist.executor.link import Link

PATIENCE = 20.0  # s


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        with closing(server.accept()[0]) as driver, sock:
            driver.settimeout(PATIENCE)
            yield Link(sock), driver


def frames(driver: socket.socket) -> Iterator[wire.Frame]:
    while frame := wire.receive(driver, 1 << 30):
        yield frame


def text(lines: Iterator[wire.Frame]) -> bytes:
    return b"".join(bytes(body) for header, body in lines if header["kind"] == "log")


def test_news_comes_before_lines_that_wait(ends):
    link, driver = ends
    for number in range(200):  # far more than the sockets take
        link.send_log(0, False, b"%06d" % number + b"x" * 50_000 + b"\n")
    link.send({"kind": "failed", "rank": 0})
    threading.Thread(target=link.close).start()
    kinds, lines = [], []
    for header, body in frames(driver):
        kinds.append(header["kind"])
        lines += body.split(b"x" * 50_000 + b"\n")[:-1]
        if header["kind"] == "bye":
            driver.close()
            break
    assert kinds.index("failed") < len(kinds) - 2
    assert kinds[-1] == "bye" and lines == sorted(lines)


def test_a_driver_that_does_not_read_costs_the_oldest_lines_and_says_how_many(ends):
    link, driver = ends
    count = 0
    while link._leaving or count < 3 * LIMIT // 1000:
        link.send_log(0, False, b"%09d " % count + b"y" * 989 + b"\n")
        count += 1
        if count > 3 * LIMIT // 1000:
            break
    threading.Thread(target=link.close).start()
    taken = list(_until_bye(driver))
    said = text(iter(taken))
    kept = said.count(b"y" * 989)
    assert sum(header.get("dropped", 0) for header, _ in taken) + kept == count
    assert said.splitlines()[-1].startswith(b"%09d " % (count - 1))


def _until_bye(driver: socket.socket) -> Iterator[wire.Frame]:
    for frame in frames(driver):
        yield frame
        if frame[0]["kind"] == "bye":
            driver.close()
            return


def test_lines_of_a_connection_that_is_reset_are_left_over_whole(ends):
    link, driver = ends
    for number in range(300):
        link.send_log(0, number % 2 == 1, b"%06d" % number + b"z" * 40_000 + b"\n")
    driver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    driver.close()  # a reset: there is something unread
    while link.up:
        link.push()
    left = {header["stderr"]: body for header, body in link.left_over(LIMIT)}
    for is_stderr, body in left.items():
        numbers = [int(line[:6]) for line in body.splitlines()]
        assert numbers == list(range(numbers[0], 300 - (not is_stderr), 2))
        assert all(len(line) == 40_006 for line in body.splitlines())


def test_any_number_of_lines_and_records_makes_few_rows(ends):
    link = Link(None)
    for number in range(320_000):
        link.send_log(number % 4, False, b"%049d\n" % number)
    for number in range(20_000):
        link.send_data("record", number % 4, {"time": 1.0, "host": "h", "message": "m" * 900})
    rows = list(link.left_over(LIMIT))
    assert len(rows) == 8
    assert sum(len(wire.pack(header)) for header, _ in rows) < 10_000
    for header, body in rows:
        if header["kind"] == "record":
            assert len(body.splitlines()) == 5_000 and json.loads(body.splitlines()[-1])["host"] == "h"
        else:
            assert len(body.splitlines()) == 80_000
    assert not any(link.waiting.values())


def test_records_are_bounded_by_their_size_and_counted():
    link = Link(None)
    for _ in range(60):
        link.send_data("record", 0, {"message": "m" * 1_000_000})
    ((header, body),) = link.left_over(LIMIT)
    dropped, *kept = map(json.loads, body.splitlines())
    assert header["kind"] == "record" and len(body) < LIMIT + 100
    assert dropped == {"dropped": 60 - len(kept)}


def test_lines_that_were_dropped_are_told_of_though_none_follows():
    link = Link(None)
    for _ in range(1000):
        link.send_log(0, False, b"out\n")
    link.waiting["log"].shorten(1)
    ((header, body),) = link.left_over(LIMIT)
    assert header == {"kind": "log", "rank": 0, "stderr": False, "dropped": 1000}
    assert body == b""


def test_a_large_outcome_waits_for_a_driver_that_pauses(ends):
    link, driver = ends
    fd = os.memfd_create("outcome")
    data = os.urandom(30 << 20)
    os.write(fd, data)
    digests: list[str | None] = []
    thread = threading.Thread(target=lambda: digests.append(link.send_outcome(3, fd, len(data))))
    thread.start()
    thread.join(0.5)  # it is stuck: the driver does not read yet
    assert thread.is_alive()
    frame = wire.receive(driver, 1 << 30)
    thread.join(PATIENCE)
    os.close(fd)
    assert frame and frame[1] == data and digests[0]


def test_a_header_that_nobody_would_take_is_not_sent():
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.pack({"text": "x" * (wire.MAX_HEADER + 1)})


def test_reports_overtake_lines_that_wait_and_keep_their_order(ends):
    link, driver = ends
    for number in range(200):  # far more than the sockets take
        link.send_log(0, False, b"%06d" % number + b"x" * 50_000 + b"\n")
    for step in range(3):
        link.send_data("report", 1, {"step": step})
    threading.Thread(target=link.close).start()
    told = [(header["kind"], bytes(body)) for header, body in _until_bye(driver)]
    kinds = [kind for kind, _ in told]
    assert kinds.index("report") < len(kinds) - 20
    reports = b"".join(body for kind, body in told if kind == "report")
    assert [json.loads(line)["step"] for line in reports.splitlines()] == [0, 1, 2]


def test_reports_that_cannot_be_sent_are_left_over(ends):
    link, driver = ends
    for step in range(60_000):  # more than the sockets take
        link.send_data("report", step % 2, {"step": step, "metrics": {"some name of a metric": 1.0}})
    driver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    driver.close()
    while link.up:
        link.push()
    left = {header["rank"]: body for header, body in link.left_over(LIMIT) if header["kind"] == "report"}
    for rank, body in left.items():
        said = [json.loads(line)["step"] for line in body.splitlines()]
        assert said == list(range(said[0], 60_000, 2)) and said[0] % 2 == rank
    assert set(left) == {0, 1}
