"""The Connect session of these tests, in a pytest process of their own, and drivers besides it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.faults import programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Without it each remote("local") server of this machine wants the same port.
os.environ.setdefault("SPARK_TESTING", "1")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A client's session; its server is on this host, with two slots."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.log.level", "ERROR").getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def ranks_work_after(spark: SparkSession, clean: None) -> Iterator[None]:
    """The promise that after a fault nothing is left and the next run in the session works."""
    from sparkdist import Launcher

    yield
    assert Launcher("plain", num_processes=2, timeout=60).launch(programs.rank).values == [0, 1]
