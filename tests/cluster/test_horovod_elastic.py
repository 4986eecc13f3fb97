"""hvd.elastic when an executor is lost: what the other one's ranks committed is there for fewer ranks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdist import Launcher, context
from tests.cluster.clusters import Cluster
from tests.cluster.test_restarts import announced, kill
from tests.faults import programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def commit_and_wait(folder: Path) -> tuple[int, int, list[tuple[int, int]]]:
    """Commits three batches; then waits, in the first attempt, to lose its peers."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 2)
    state = hvd.elastic.TorchState(model=model, batch=0)
    told: list[tuple[int, int]] = []
    state.register_reset_callbacks([lambda: told.append((hvd.size(), state.batch))])

    @hvd.elastic.run
    def loop(state: Any) -> int:
        began = int(state.batch)
        while state.batch < 3:
            state.batch += 1
            state.commit()
        programs.announce_in(folder, context().attempt)
        while not context().attempt:
            hvd.allreduce(torch.ones(1))
            time.sleep(0.01)
        return began

    return loop(state), hvd.size(), told


@pytest.mark.slow
def test_a_smaller_gang_goes_on_and_resets(
    cluster: Cluster, spark: SparkSession, clean: None, tmp_path: Path
):
    launcher = Launcher(
        "horovod", num_processes=cluster.slots, min_processes=1, resize_wait=0, max_restarts=1, timeout=100
    )
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(launcher.launch, commit_and_wait, tmp_path)
        assert announced(tmp_path, 0, cluster.slots)
        kill(spark, min)
        results = outcome.result(timeout=110)
    size = cluster.cores
    assert results.values == [(3, size, [(size, 3)])] * size
    assert [attempt.world_size for attempt in results.attempts] == [cluster.slots, size]
