"""The clusters as fixtures, one after another: a process holds one Spark session at a time.

So this folder is run by a pytest process of its own. pytest groups tests by `cluster`, whose
parameter is of the session's scope: each kind starts once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import sessions
from tests.cluster import clusters
from tests.cluster.clusters import Cluster
from tests.faults import programs
from tests.faults.ways import Way

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_CLUSTERS = {"2x1": ("local-cluster[2,1,1024]", 1), "2x2": ("local-cluster[2,2,1024]", 2)}


@pytest.fixture(scope="session", autouse=True)
def work_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where executors of a local-cluster work: the JVM reads it once, and would use Spark's own folder."""
    os.environ["SPARK_WORKER_DIR"] = str(tmp_path_factory.mktemp("work"))


@pytest.fixture(
    scope="session",
    params=["2x1", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("2x2", "standalone"))],
)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every kind of cluster."""
    if request.param in LOCAL_CLUSTERS:
        yield Cluster(request.param, *LOCAL_CLUSTERS[request.param])
        return
    with clusters.standalone(tmp_path_factory.mktemp(request.param)) as master:
        yield Cluster(request.param, master, 2)


@pytest.fixture(scope="session")
def spark(cluster: Cluster) -> Iterator[SparkSession]:
    """A real session on the cluster, instead of the one on `local[2]`."""
    session = clusters.start_session(cluster.confs)
    yield session
    sessions.stop(session)


def _way(launcher: str, ranks: int, folder: Path) -> Iterator[Way]:
    way = Way(launcher, False, folder / "moment", ranks)
    yield way
    assert way.launch(programs.rank).values == list(range(ranks))


@pytest.fixture
def way(cluster: Cluster, spark: SparkSession, clean: None, tmp_path: Path) -> Iterator[Way]:
    """Runs of as many ranks as there are slots; afterwards the next run must work."""
    yield from _way("fast", cluster.slots, tmp_path)


# torchrun's interpreters each import torch: seconds for every run.
@pytest.fixture(params=["fast", pytest.param("torchrun", marks=pytest.mark.slow)])
def either(
    request: pytest.FixtureRequest, cluster: Cluster, spark: SparkSession, clean: None, tmp_path: Path
) -> Iterator[Way]:
    """The same by either launcher."""
    yield from _way(request.param, cluster.slots, tmp_path)


@pytest.fixture
def moments(tmp_path: Path) -> Path:
    """A folder in which ranks say where they are."""
    folder = tmp_path / "moments"
    folder.mkdir()
    return folder
