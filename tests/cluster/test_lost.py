"""Spark's own processes are killed under a run: executors, Python workers, the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdist import TrainingFailed
from tests import support
from tests.cluster import clusters
from tests.cluster.clusters import Cluster
from tests.faults import programs
from tests.faults.ways import Way

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GONE = 10.0  # s until nothing of a run is left once Spark has lost a part of it


def wait_for_ranks(folder: Path, count: int) -> set[int]:
    """Waits until all ranks have announced themselves, and returns their pids."""
    names = {str(rank) for rank in range(count)}
    assert support.wait_until(lambda: names <= set(os.listdir(folder)), 60)
    return {int((folder / name).read_text()) for name in names}


@contextmanager
def running(way: Way, folder: Path) -> Iterator[tuple[Future[Any], set[int]]]:
    """A run whose ranks wait for ever; yields its outcome to come, and the ranks' pids."""
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(way.launch, programs.announce_and_wait, folder)
        yield outcome, wait_for_ranks(folder, way.ranks)


def loss(outcome: Future[Any], seconds: float) -> TrainingFailed:
    began = time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        outcome.result(timeout=40)
    assert time.monotonic() - began < seconds
    assert {failure.kind for failure in caught.value.failures.values()} == {"lost"}
    return caught.value


def end(pids: set[int], seconds: float) -> None:
    assert support.wait_until(lambda: not pids & support.parents().keys(), seconds), support.describe(pids)


def workers(spark: SparkSession) -> set[int]:
    """The Python workers of a session's executors: children of the daemons below their JVMs."""
    tree = support.parents()
    daemons = {pid for pid, parent in tree.items() if parent in clusters.executor_jvms(spark)}
    return {pid for pid, parent in tree.items() if parent in daemons}


def test_an_executor_is_killed(way: Way, cluster: Cluster, spark: SparkSession, moments: Path):
    with running(way, moments) as (outcome, pids):
        executors = clusters.executor_jvms(spark)
        assert len(executors) == clusters.EXECUTORS
        os.kill(min(executors), signal.SIGKILL)
        end(pids, GONE)
        loss(outcome, GONE)
    # Spark starts another one, and until then there are too few slots.
    assert support.wait_until(lambda: clusters.executor_count(spark) == clusters.EXECUTORS, 60)


@pytest.mark.parametrize("which", [min, pytest.param(max, marks=pytest.mark.slow)], ids=["first", "last"])
def test_a_python_worker_is_killed(
    way: Way, spark: SparkSession, moments: Path, which: Callable[[set[int]], int]
):
    with running(way, moments) as (outcome, pids):
        os.kill(which(workers(spark)), signal.SIGKILL)
        loss(outcome, GONE)
        end(pids, GONE)


@pytest.mark.filterwarnings("error")  # the driver is reachable: no notice says that it is not
def test_an_agent_is_killed(way: Way, moments: Path):
    with running(way, moments) as (outcome, pids):
        agents = {support.parents()[pid] for pid in pids}
        assert len(agents) == clusters.EXECUTORS
        os.kill(max(agents), signal.SIGKILL)
        error = loss(outcome, GONE)
        end(pids, 1)
    assert "agent was killed" in str(error)


# --- the driver ---------------------------------------------------------------------------------

# A user's driver. It is told where ranks announce themselves, line by line, and says what came of it.
DRIVER = """
import json, signal, sys, time
from pathlib import Path
from sparkdist import TorchDistributor
from tests.cluster import clusters
from tests.faults import programs

def say(**facts):
    print("\\n@" + json.dumps(facts), flush=True)

ranks, confs = int(sys.argv[1]), json.loads(sys.argv[2])
spark = clusters.start_session(confs)
distributor = TorchDistributor(ranks, local_mode=False, timeout=60)
say(application=spark.sparkContext.applicationId)
for line in sys.stdin:
    try:
        distributor.run(programs.announce_and_wait, Path(line.strip()))
    except KeyboardInterrupt:
        raised = time.time()
    say(raised=raised, next=distributor.launch(programs.rank).values)
"""


class Driver:
    """A driver in a process of its own."""

    def __init__(self, cluster: Cluster) -> None:
        root = str(Path(__file__).parents[2])
        self.ranks = cluster.slots
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(cluster.slots), json.dumps(cluster.confs)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])},
            cwd=root,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.application = self.hear()["application"]

    def run_in(self, folder: Path) -> set[int]:
        """Has it start ranks that wait for ever, and returns their pids."""
        assert self.process.stdin
        print(folder, file=self.process.stdin, flush=True)
        return wait_for_ranks(folder, self.ranks)

    def hear(self) -> dict[str, Any]:
        return support.hear(self.process)


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Iterator[Driver]:
    driver = Driver(cluster)
    try:
        yield driver
    finally:
        driver.process.kill()
        driver.process.communicate()


def test_ctrl_c(driver: Driver, clean: None, moments: Path):
    pids = driver.run_in(moments)
    interrupted = time.time()
    driver.process.send_signal(signal.SIGINT)
    end(pids, 5)
    said = driver.hear()
    assert said["raised"] - interrupted < 8
    assert said["next"] == list(range(driver.ranks))


def test_the_driver_is_killed(driver: Driver, clean: None, moments: Path):
    """The last of this module: it ends the driver."""
    others = support.forkservers()
    pids = driver.run_in(moments)
    servers = support.forkservers()
    executors = clusters.executors_of(driver.application)
    assert executors
    driver.process.kill()
    end(pids, GONE)
    end(executors, 30)
    # Its own are gone with its application; the session of these tests keeps its.
    assert support.wait_until(lambda: support.forkservers() <= others, 10), support.describe(servers)
