"""Executors that are lost, replaced and added: the gang starts again, smaller or larger where it may."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdist import PreflightError, Results, TrainingFailed, TrainingTimeout
from tests import support
from tests.cluster import clusters
from tests.cluster.clusters import Cluster
from tests.faults import programs
from tests.faults.ways import Way

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

import pytest


def train(folder: Path, is_done: Callable[[Any], bool], how: str = "gloo") -> tuple[int, int, int]:
    """Meets the other ranks again and again until the gang is as it should be, or is ended."""
    import torch.distributed as dist

    from sparkdist import context

    here = context()
    if how == "gloo":
        dist.init_process_group("gloo")
        dist.barrier()
    programs.announce_in(folder, here.attempt)
    while not is_done(here):
        if how == "gloo":
            dist.barrier()
        time.sleep(0.01)
    return here.rank, here.world_size, here.attempt


def is_second(here: Any) -> bool:
    return bool(here.attempt > 0)


def is_whole_again(here: Any) -> bool:
    return bool(here.attempt > 1)


def never(here: Any) -> bool:
    return False


def announced(folder: Path, attempt: int, ranks: int) -> bool:
    return support.wait_until(lambda: len(list(folder.glob(f"{attempt}/[0-9]*"))) == ranks, 60)


def kill(spark: SparkSession, which: Callable[[set[int]], int] = max) -> None:
    os.kill(which(clusters.executor_jvms(spark)), signal.SIGKILL)


def decommission(spark: SparkSession) -> None:
    """As a cluster manager does that is about to take a machine away."""
    context = spark.sparkContext
    assert context._jvm
    scala, known = context._jsc.sc(), context._jsc.sc().getExecutorIds()
    info = context._jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo(
        "taken away", context._jvm.scala.Option.empty()
    )
    assert scala.schedulerBackend().decommissionExecutor(known.head(), info, False, False)


@pytest.mark.parametrize(
    ("lose", "how"),
    [(kill, "gloo"), (kill, "alone"), pytest.param(decommission, "gloo", marks=pytest.mark.slow)],
)
def test_a_lost_executor_is_no_failure_of_the_training(
    way: Way,
    cluster: Cluster,
    spark: SparkSession,
    moments: Path,
    lose: Callable[[SparkSession], None],
    how: str,
):
    """Whatever its peers say of it: they see their connections end."""
    with ThreadPoolExecutor(1) as pool:
        outcome: Future[Results] = pool.submit(
            way.launch, train, moments, is_second, how, max_preemptions=None
        )
        assert announced(moments, 0, way.ranks)
        lose(spark)
        results = outcome.result(timeout=90)
    assert results.values == [(rank, way.ranks, 1) for rank in range(way.ranks)]
    root = results.attempts[0].failure
    assert root and root.preempted and root.kind == "lost"
    assert "executor" in str(root).lower()


@pytest.mark.parametrize("which", [min, pytest.param(max, marks=pytest.mark.slow)], ids=["first", "last"])
def test_an_executor_is_lost_while_a_rank_starts(
    way: Way, spark: SparkSession, moments: Path, which: Callable[[set[int]], int]
):
    with ThreadPoolExecutor(1) as pool:
        argument = programs.Unpickled(programs.block_rank_0_once, moments)
        outcome: Future[Results] = pool.submit(way.launch, programs.take, argument, max_preemptions=None)
        assert announced(moments, 0, 1)
        kill(spark, which)
        results = outcome.result(timeout=90)
    assert len(results.attempts) == 2
    root = results.attempts[0].failure
    assert root and root.preempted and root.kind == "lost"


def test_a_killed_spark_worker_is_a_failure(way: Way, spark: SparkSession, moments: Path):
    from tests.cluster.test_lost import workers

    with ThreadPoolExecutor(1) as pool:
        outcome: Future[Results] = pool.submit(way.launch, train, moments, is_second, max_preemptions=9)
        assert announced(moments, 0, way.ranks)
        os.kill(max(workers(spark)), signal.SIGKILL)
        with pytest.raises(TrainingFailed) as caught:
            outcome.result(timeout=60)
    assert caught.value.root.kind == "lost" and not caught.value.root.preempted


# --- elasticity ---------------------------------------------------------------------------------


def test_an_elastic_gang_starts_with_the_slots_there_are(way: Way, cluster: Cluster):
    began = time.monotonic()
    results = way.launch(programs.rank, num_processes=cluster.slots + 3, min_processes=1, resize_wait=0.2)
    assert results.values == list(range(cluster.slots))
    assert results.attempts[0].world_size == results.world_size == cluster.slots
    assert time.monotonic() - began < 20


def test_fewer_slots_than_min_processes(way: Way, cluster: Cluster):
    least = cluster.slots + 1
    with pytest.raises(PreflightError, match=f"needs {least} slots at once"):
        way.launch(programs.rank, num_processes=least + 1, min_processes=least, resize_wait=0)


def test_slots_are_waited_for_no_longer_than_the_run_may_take(way: Way, cluster: Cluster):
    least = cluster.slots + 1
    with pytest.raises(TrainingTimeout, match="waiting for"):
        way.launch(programs.rank, num_processes=least + 1, min_processes=least, resize_wait=60, timeout=1)


@pytest.mark.slow
def test_a_gang_shrinks_and_grows_with_its_executors(
    way: Way, cluster: Cluster, spark: SparkSession, moments: Path
):
    with ThreadPoolExecutor(1) as pool:
        outcome: Future[Results] = pool.submit(
            way.launch,
            train,
            moments,
            is_whole_again,
            max_preemptions=None,
            min_processes=1,
            resize_wait=0,
            grow=True,
        )
        assert announced(moments, 0, way.ranks)
        kill(spark, min)
        results = outcome.result(timeout=100)
    assert [attempt.world_size for attempt in results.attempts] == [way.ranks, cluster.cores, way.ranks]
    assert [rank for rank, _, _ in results.values] == list(range(way.ranks))
    assert "slots for more ranks" in (results.attempts[1].cause or "")
