"""What an attempt's rows mean, beside what the driver knows."""

from __future__ import annotations

import time

import pytest

from sparkdist import PreflightError, TrainingFailed
from sparkdist.driver.board import Board
from sparkdist.driver.outcome import settle
from sparkdist.executor.last_words import GangLost, rows_in
from sparkdist.executor.leader import Row
from tests import orders

ORDER = orders.plain(2)
LOST = {"kind": "lost", "rank": 1, "node": 1, "host": "b", "message": "nobody there", "speechless": True}
RAISED = {
    "kind": "raised",
    "rank": 1,
    "node": 1,
    "host": "b",
    "type_name": "ValueError",
    "bases": ["ValueError"],
    "message": "boom",
    "traceback": "",
    "failed_at": 1.0,
}


def board_of(row: Row, **known: object) -> Board:
    """A board with the last words of one node."""
    board = Board(**known)  # type: ignore[arg-type]
    rows = rows_in(str(GangLost([row])))
    assert rows
    board.rows.set_result(rows)
    return board


@pytest.mark.parametrize("is_executor", [True, False])
def test_nodes_that_could_not_start_because_another_was_lost(is_executor: bool):
    board = board_of((LOST, b""), lost={0: time.monotonic()}, executor_lost=is_executor)
    with pytest.raises(TrainingFailed) as caught:
        settle(ORDER, board)
    root = caught.value.root
    assert (root.rank, root.kind, root.preempted) == (0, "lost", is_executor)


def test_a_node_that_could_not_start_by_itself():
    with pytest.raises(PreflightError, match="no such module"):
        settle(ORDER, board_of(({"kind": "error", "message": "no such module"}, b""), executor_lost=True))


@pytest.mark.parametrize("connected", [True, False])
def test_a_node_that_the_driver_cannot_hear_and_that_fails(connected: bool):
    """The others are stopped by Spark, without rows: nothing says that they were lost."""
    board = board_of((RAISED, b""), lost={1: time.monotonic()} if connected else {})
    with pytest.raises(TrainingFailed) as caught:
        settle(ORDER, board)
    assert (caught.value.root.rank, caught.value.root.kind) == (1, "exception")
