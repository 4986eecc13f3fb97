"""What a run shares a session with: other runs, Spark's own optimisers, too few slots."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sparkdist import PreflightError
from tests.faults import programs
from tests.faults.ways import Way, running


def test_one_of_two_runs_fails(fast: Way, tmp_path: Path):
    with running(fast, tmp_path, num_processes=1) as run:
        error = fast.failure(programs.raise_it, ValueError, "mine", num_processes=1)
        assert error.root.message == "mine"
        run.go.touch()
        assert run.outcome.result(timeout=20).values == [0]


def test_more_ranks_than_slots(fast_on_spark: Way):
    began = time.monotonic()
    with pytest.raises(PreflightError, match="needs 3 slots at once.*has 2"):
        fast_on_spark.launch(programs.rank, num_processes=3)
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("setting", ["true", "false"])
def test_adaptive_query_execution(fast_on_spark: Way, spark: Any, setting: str):
    """It would make one task of two small ones."""
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", setting)
    try:
        assert fast_on_spark.launch(programs.rank).values == [0, 1]
        error = fast_on_spark.failure_of_rank_1(programs.raise_it, ValueError, "boom")
        assert error.root.message == "boom"
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", before)
