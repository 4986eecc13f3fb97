"""One node of a gang, led by hand beside a real control channel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

import pytest

from sparkdist import values, wire
from sparkdist.driver.board import Board
from sparkdist.driver.control import ControlChannel
from sparkdist.executor.leader import Row, Site, lead
from sparkdist.executor.link import dial
from sparkdist.executor.order import Order
from sparkdist.executor.topology import Node

ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def channel(board: Board) -> Iterator[ControlChannel]:
    with ControlChannel("127.0.0.1", "127.0.0.1", board, lambda rank, is_stderr, data: None) as channel:
        yield channel


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with subprocess.Popen(["sleep", "1000"]) as parent:
        yield Site(root=ROOT, base=tmp_path, parent=parent.pid, sys_path=tuple(sys.path), cwd=str(tmp_path))
        parent.kill()


def order_of(channel: ControlChannel) -> Order:
    return Order(
        run_id="run",
        attempt=0,
        framework="plain",
        launcher="fast",
        launcher_args=(),
        world_size=2,
        tasks=2,
        processes_per_task=1,
        script=None,
        env={},
        threads=1,
        control=channel.address,
        token=channel.token.hex(),
        logs="none",
        idle_timeout=600.0,
    )


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
            lead, order, Node(0, 2, (0,), 0, 1), site, values.dumps((os.getpid, (), {})), b"", gather=gather
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
