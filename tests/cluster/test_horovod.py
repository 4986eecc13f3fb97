"""Horovod on executors of their own; they share a host, and are nodes all the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdist import HorovodRunner, TrainingFailed, context
from sparkdist.horovod import run, run_elastic
from tests.cluster.clusters import EXECUTORS, Cluster
from tests.cluster.test_restarts import announced, kill
from tests.faults import programs
from tests.horovod.programs import collectives, expected, places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_collectives_across_executors(cluster: Cluster, spark: SparkSession, clean: None):
    values = run(collectives, num_proc=cluster.slots)
    assert [where for where, _ in values] == places(EXECUTORS, cluster.cores)
    assert all(found == expected(cluster.slots) for _, found in values)
    with pytest.warns(DeprecationWarning, match="np=0"):
        assert HorovodRunner(np=0).run(lambda: 7) == 7


def test_an_exception_on_the_other_executor(cluster: Cluster, spark: SparkSession, clean: None):
    def fail():
        import horovod.torch as hvd
        import torch

        hvd.init()
        if hvd.rank() == hvd.size() - 1:
            raise LookupError("no more data")
        hvd.allreduce(torch.ones(1))

    with pytest.raises(TrainingFailed, match="no more data") as caught:
        run(fail, num_proc=cluster.slots, timeout=60)
    assert caught.value.root.rank == cluster.slots - 1


def train(folder: Path) -> list[tuple[int, int, int]]:
    """Commits step after step until the gang is whole again; returns what each attempt was like."""
    import horovod.torch as hvd
    from horovod.common.elastic import ObjectState

    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, attempts=[])
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def steps(state):
        state.attempts = [*state.attempts, (hvd.size(), state.step, sum(resets))]
        began = state.step
        while context().attempt < 2 or state.step == began:
            state.step += 1
            state.commit()
            hvd.broadcast_object(state.step)  # no rank is ahead of the others
            if state.step == began + 3:
                programs.announce_in(folder, context().attempt)
        return state.attempts

    return steps(state)


@pytest.mark.slow
def test_a_state_outlives_an_executor_and_follows_the_gang_as_it_grows(
    cluster: Cluster, spark: SparkSession, clean: None, moments: Path
):
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(
            run_elastic, train, (moments,), num_proc=cluster.slots, min_num_proc=1, resize_wait=0, timeout=100
        )
        assert announced(moments, 0, cluster.slots)
        kill(spark, min)
        values = outcome.result(timeout=100)
    assert values == [values[0]] * cluster.slots
    sizes, steps, told = zip(*values[0], strict=True)
    assert sizes == (cluster.slots, cluster.cores, cluster.slots)
    assert told == (0, cluster.cores, cluster.slots)
    assert steps[0] == 0 and 3 <= steps[1] < steps[2]
