"""Somebody else ends the run's job: Spark takes 2 to 4 s to kill a Python worker, and ranks are gone in 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ways import Way, running

SOON = 1.0  # s from the cancel to the end of the ranks

# What the user's thread does before it launches, and what another thread of the user's then does.
CANCELS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "group": (lambda sc: sc.setJobGroup("mine", "my work"), lambda sc: sc.cancelJobGroup("mine")),
    "tag": (lambda sc: sc.addJobTag("mine"), lambda sc: sc.cancelJobsWithTag("mine")),
    "all": (lambda sc: None, lambda sc: sc.cancelAllJobs()),
}


@pytest.mark.classic
@pytest.mark.parametrize("how", CANCELS)
def test_jobs_are_cancelled(on_spark: Way, spark: Any, tmp_path: Path, how: str):
    before, cancel = CANCELS[how]
    with running(on_spark, tmp_path, lambda: before(spark.sparkContext)) as run:
        cancel(spark.sparkContext)
        run.end(SOON)
        assert "cancelled" in str(run.loss())


@pytest.mark.classic
def test_another_group_is_cancelled(fast_on_spark: Way, spark: Any, tmp_path: Path):
    with running(fast_on_spark, tmp_path, lambda: spark.sparkContext.setJobGroup("mine", "my work")) as run:
        spark.sparkContext.cancelJobGroup("not mine")
        run.go.touch()
        assert run.outcome.result(timeout=20).values == [0, 1]
