"""What is made of reports on the driver, also of those that are none."""

from __future__ import annotations

import json
import time

import pytest

from sparkdist.driver import progress
from sparkdist.driver.board import Board


def line(**changes: object) -> bytes:
    said = {"attempt": 1, "step": 3, "metrics": {"loss": 0.5}, "time": 1700000000.25, **changes}
    return json.dumps(said).encode() + b"\n"


NO_METRICS: list[object] = [None, 3, [1], {"a": None}, {"a": "x"}, {"a": [1]}, {"a": 10**400}]
MALFORMED = [
    b"",
    b"{",
    b"[]\n",
    b"3",
    b"null",
    b"\xff\xfe",
    b"{}",
    b'{"dropped": 3}',
    b"[" * 100_000,
    line()[5:],
    *(line(attempt=value) for value in (None, "x", [0])),
    *(line(step=value) for value in ("x", [0], {"a": 0})),
    *(line(metrics=value) for value in NO_METRICS),
    *(line(time=value) for value in (None, "x", 1e300, float("nan"), -1e18)),
]


@pytest.mark.parametrize("wrong", MALFORMED, ids=lambda wrong: repr(wrong[:30]))
def test_what_is_no_report_is_left_out(wrong):
    board = Board()
    progress.take(board, 2, line(step=1) + wrong.rstrip() + b"\n" + line(step=2))
    assert [(report.rank, report.step) for report in board.reports] == [(2, 1), (2, 2)]
    strange: list[object] = [None, "0", [], {}]
    for rank in strange:
        progress.take(board, rank, line())
    assert len(board.reports) == 2


def test_reports_are_in_the_order_of_their_arrival():
    board, before = Board(), time.monotonic()
    assert not board.reports and board.last_report is None
    for step, rank in enumerate((1, 0, 1, 3)):
        progress.take(board, rank, line(step=step))
    assert [report.step for report in board.reports] == [0, 1, 2, 3]
    assert board.last_report and board.last_report.rank == 0
    assert list(board.reported) == [1, 0, 3]
    assert all(before <= moment <= time.monotonic() for moment in board.reported.values())


@pytest.mark.parametrize(
    ("step", "metrics", "words"),
    [
        (120, {"loss": 0.123456}, "step 120, loss=0.1235"),
        (None, {"loss": float("nan"), "lr": 1e-9}, "loss=nan, lr=1e-09"),
        (7, {}, "step 7"),
        (None, {}, ""),
        (0, {"a": 1, "b": 2, "c": 3, "d": 4}, "step 0, a=1, b=2, c=3"),
        (1, {"x\x1b[2J\n\r" + "y" * 99: 123456}, "step 1, x\\x1b[2J \\ryyyyyyyyyyyyy=1.235e+05"),
    ],
)
def test_the_headline(step, metrics, words):
    board = Board()
    progress.take(board, 0, line(step=step, metrics=metrics))
    assert progress.headline(board) == words


def test_there_is_no_headline_without_a_report():
    assert progress.headline(Board()) == ""
