"""Every way to start ranks, as fixtures, and the promise that after a fault the next run works."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.faults import programs
from tests.faults.ways import Way


def _way(request: pytest.FixtureRequest, name: str) -> Iterator[Way]:
    launcher, place = name.split("-")
    for promise in ("spark", "clean"):
        request.getfixturevalue(promise)
    way = Way(launcher, place == "local", request.getfixturevalue("tmp_path") / "moment")
    yield way
    assert way.launch(programs.rank).values == [0, 1]


# Each of its interpreters imports torch: seconds for every run.
TORCHRUN_ON_SPARK = pytest.param("torchrun-spark", marks=pytest.mark.slow)
TORCHRUN = pytest.param("torchrun-local", marks=pytest.mark.slow)


@pytest.fixture(params=["fast-spark", "fast-local", TORCHRUN_ON_SPARK, TORCHRUN])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Every launcher at every place: for what a launcher could get wrong."""
    yield from _way(request, request.param)


@pytest.fixture(params=["fast-spark", "fast-local", TORCHRUN])
def lean(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Every launcher and every place, but not their product, which takes long."""
    yield from _way(request, request.param)


@pytest.fixture(params=["fast-spark", "fast-local"])
def fast(request: pytest.FixtureRequest) -> Iterator[Way]:
    """The fast launcher at every place: for what happens above or below a launcher."""
    yield from _way(request, request.param)


@pytest.fixture(params=["fast-spark", TORCHRUN_ON_SPARK])
def on_spark(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Every launcher on Spark: for what takes long, or is Spark's."""
    yield from _way(request, request.param)


@pytest.fixture(params=["fast-spark"])
def fast_on_spark(request: pytest.FixtureRequest) -> Iterator[Way]:
    """The fast launcher on Spark: for what is Spark's and takes no other way through a launcher."""
    yield from _way(request, request.param)


@pytest.fixture(scope="session")
def where(pytestconfig: pytest.Config) -> str:
    """Where drivers in processes of their own have their sessions: see tests/faults/driver.py."""
    return "remote=local[2]" if pytestconfig.option.connect else "local[2]"


@pytest.fixture
def on_driver(request: pytest.FixtureRequest) -> Iterator[Way]:
    """The fast launcher on the driver: for what the place makes no difference to."""
    yield from _way(request, "fast-local")


@pytest.fixture
def torchrun(request: pytest.FixtureRequest) -> Iterator[Way]:
    """torchrun on the driver: for what is torchrun's and takes long."""
    yield from _way(request, "torchrun-local")


@pytest.fixture
def disks() -> Sequence[str]:
    """A command within which a program may mount file systems, that end with it."""
    within = ["unshare", "--mount"]
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("no file systems can be mounted here")
    return within


@pytest.fixture
def jobs(spark: Any) -> Callable[[], int]:
    """Counts the Spark jobs that were ever started; Connect's server is in this process, too."""
    from pyspark import SparkContext

    scala = SparkContext._active_spark_context._jsc.sc()  # type: ignore[union-attr]
    return lambda: int(scala.dagScheduler().numTotalJobs())
