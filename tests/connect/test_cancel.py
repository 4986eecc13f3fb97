"""The client, or another of its threads, interrupts the run's operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_cancel import SOON
from tests.faults.ways import Way, running

INTERRUPTS: dict[str, Callable[[Any], list[str]]] = {
    "tag": lambda spark: spark.interruptTag("mine"),
    "all": lambda spark: spark.interruptAll(),
}


@pytest.mark.usefixtures("ranks_work_after")
@pytest.mark.parametrize("how", INTERRUPTS)
def test_operations_are_interrupted(spark: Any, tmp_path: Path, how: str):
    way = Way("fast", False, tmp_path / "moment")
    with running(way, tmp_path, lambda: spark.addTag("mine")) as run:
        assert len(INTERRUPTS[how](spark)) == 1
        run.end(SOON)
        run.loss()
