"""One node of a gang, led by hand beside a real control channel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdist import values, wire
from sparkdist.driver.board import Board
from sparkdist.driver.control import ControlChannel
from sparkdist.executor.leader import Row, Site, lead
from sparkdist.executor.link import dial
from sparkdist.executor.order import NodeError, Order
from sparkdist.executor.topology import Node
from tests import orders, support
from tests.faults import programs

ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def channel(board: Board) -> Iterator[ControlChannel]:
    with ControlChannel("127.0.0.1", "127.0.0.1", board, lambda *line: None) as channel:
        yield channel


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with subprocess.Popen(["sleep", "1000"]) as parent:
        yield Site(root=ROOT, base=tmp_path, parent=parent.pid, sys_path=tuple(sys.path), cwd=str(tmp_path))
        parent.kill()


def order_of(channel: ControlChannel) -> Order:
    return orders.plain(2, control=channel.address, token=channel.token.hex())


@pytest.mark.parametrize("other", ["comes late", "never comes"])
def test_a_node_whose_ranks_return_at_once_stays_until_all_have_met(
    channel: ControlChannel, board: Board, site: Site, other: str
):
    """The others may need its task to learn where to meet, and would wait for it for ever."""
    order, gathered = order_of(channel), []

    def gather(told: str) -> str:
        gathered.append(told)
        return told

    with ThreadPoolExecutor(1) as pool:
        rows: Future[list[Row]] = pool.submit(
            lead, order, Node(0, (0,), (1, 1)), site, values.dumps((os.getpid, (), {})), b"", gather=gather
        )
        assert board.wait(lambda b: 0 in b.returned, 30)
        with pytest.raises(NotYet):
            rows.result(timeout=0.5)
        if other == "comes late":
            sock = dial(order)
            assert sock
            with sock:
                wire.send(sock, {"kind": "hello", "node": 1, "nodes": 2})
                assert len(rows.result(timeout=10)) == 1
                wire.send(sock, {"kind": "bye"})
        else:
            assert len(rows.result(timeout=20)) == 1
    assert bool(gathered) == (other == "never comes")


@pytest.fixture
def led(channel: ControlChannel, site: Site) -> Iterator[Callable[..., Future[list[Row]]]]:
    """Starts one of the gang's two nodes, in a thread."""
    agents: list[socket.socket] = []
    with ThreadPoolExecutor(1) as pool:

        def start(index: int, function: object, *args: object, **changes: Any) -> Future[list[Row]]:
            parcel = changes.pop("parcel", b"")
            order = replace(order_of(channel), **changes)
            node, data = Node(index, (index,), (1, 1)), values.dumps((function, args, {}))
            return pool.submit(lead, order, node, site, data, parcel, agents.append)

        yield start
        for agent in agents:
            with suppress(OSError):  # it has ended, as it should
                agent.shutdown(socket.SHUT_RDWR)


def join(channel: ControlChannel, index: int) -> socket.socket:
    """Is the other node, of which there is an agent alone."""
    sock = dial(order_of(channel))
    assert sock
    wire.send(sock, {"kind": "hello", "node": index, "nodes": 2})
    return sock


def hears(sock: socket.socket) -> Iterator[str]:
    """What an agent is told, up to the end of its connection."""
    while frame := wire.receive(sock, max_body=0):
        yield frame[0]["kind"]


def test_a_node_that_has_met_the_others_ends_though_one_loses_its_link(
    channel: ControlChannel, board: Board, led: Callable[..., Future[list[Row]]], tmp_path: Path
):
    rows = led(0, programs.announce_and_return, tmp_path, tmp_path / "go")
    with join(channel, 1) as other:
        assert "complete" in hears(other)
        assert support.wait_until((tmp_path / "0").exists, 30)
    assert board.wait(lambda b: 1 in b.lost, 10)
    (tmp_path / "go").touch()
    ((row, _),) = rows.result(timeout=20)
    assert (row["kind"], row["untold"]) == ("returned", True)


def test_a_node_that_waits_for_one_that_is_lost(
    channel: ControlChannel, led: Callable[..., Future[list[Row]]]
):
    """The ranks are lost with it: what a new attempt may mend is no error of this node."""
    rows = led(1, os.getpid)
    with join(channel, 0) as other:
        assert "complete" in hears(other)
    ((row, _),) = rows.result(timeout=20)
    assert (row["kind"], row["rank"], row["untold"]) == ("lost", 1, True)
    assert "before all had started" in row["message"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"modules": ("no_such_module",)}, "has no no_such_module"),
        ({"parcel": b"no archive"}, "BadZipFile"),
        ({"stall_timeout": "no number"}, "the agent failed"),
    ],
    ids=["a module is missing", "the parcel is broken", "there is no agent yet"],
)
def test_a_node_that_cannot_start_its_ranks_takes_leave(
    channel: ControlChannel,
    board: Board,
    led: Callable[..., Future[list[Row]]],
    changes: dict[str, Any],
    reason: str,
):
    """Else the others would believe that it was lost, and that would be told instead of its reason."""
    with pytest.raises(NodeError, match=reason):
        led(0, os.getpid, **changes).result(timeout=20)
    assert not board.wait(lambda b: bool(b.lost), 0.5)


def test_a_node_that_comes_after_one_was_lost_knows_that_not_all_can_be_told(
    channel: ControlChannel, board: Board, led: Callable[..., Future[list[Row]]]
):
    join(channel, 1).close()
    assert board.wait(lambda b: 1 in b.lost, 10)
    ((row, _),) = led(0, programs.raise_it, ValueError, "boom").result(timeout=20)
    assert (row["kind"], row["untold"]) == ("raised", True)
