"""What the tests on Spark Connect share. They, and tests/faults again, use one pytest process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.faults import programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def ranks_work_after(spark: SparkSession, clean: None) -> Iterator[None]:
    """The promise that after a fault nothing is left and the next run in the session works."""
    from sparkdist import Launcher

    yield
    assert Launcher("plain", num_processes=2, timeout=60).launch(programs.rank).values == [0, 1]
