"""Rows as the text of an exception."""

from __future__ import annotations

import os

import pytest

from sparkdist.executor.last_words import GangLost, rows_in
from sparkdist.executor.leader import Row


def test_rows_come_back_from_the_middle_of_any_text():
    rows: list[Row] = [
        ({"kind": "raised", "rank": 3, "message": "\ud800 \u2028"}, os.urandom(1000)),
        ({"kind": "error"}, b""),
    ]
    text = f"org.apache.spark.SparkException: Job aborted ...\nPythonException: {GangLost(rows)}\n\tat a.b(c)"
    assert rows_in(text) == rows


@pytest.mark.parametrize("text", ["", "the gang was lost", "sparkdist()", "a (sparkdist) is b"])
def test_other_texts_hold_none(text):
    assert rows_in(text) is None


def test_the_text_is_bounded_and_what_is_said_of_ranks_comes_first():
    ranks = [({"kind": "raised", "rank": rank}, os.urandom(100)) for rank in range(8)]
    logs = [
        ({"kind": "log", "rank": rank, "stderr": False}, os.urandom(1 << 20).hex().encode())
        for rank in range(8)
    ]
    text = str(GangLost([*logs, *ranks]))
    assert len(text) < 1 << 20
    told = rows_in(text)
    assert told and told[:8] == ranks
    assert logs[0][1].endswith(told[8][1]) and told[8][1]


def test_of_too_many_reports_the_last_ones_are_told():
    lines = b"".join(b'{"step": %d}\n' % step for step in range(100_000))
    rows: list[Row] = [({"kind": "report", "rank": 0}, lines), ({"kind": "raised", "rank": 0}, b"outcome")]
    failed, (header, said) = rows_in(str(GangLost(rows))) or []
    assert failed == rows[1] and header == rows[0][0]
    assert lines.endswith(said) and 100_000 < len(said) < len(lines)
