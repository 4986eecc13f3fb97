"""Horovod on executors of their own; they share a host, and are nodes all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sparkdist import HorovodRunner, TrainingFailed
from sparkdist.horovod import run
from tests.cluster.clusters import EXECUTORS, Cluster
from tests.horovod.programs import collectives, expected, places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_collectives_across_executors(cluster: Cluster, spark: SparkSession, clean: None):
    values = run(collectives, num_proc=cluster.slots)
    assert [where for where, _ in values] == places(EXECUTORS, cluster.cores)
    assert all(found == expected(cluster.slots) for _, found in values)
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
