"""What a run is to the session it borrows: it shares it, and leaves it and its workers as they were."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdist import Launcher, PreflightError, TrainingFailed
from tests import support
from tests.cluster.clusters import EXECUTORS, Cluster
from tests.faults import programs
from tests.faults.ways import Way

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_too_few_slots(way: Way, cluster: Cluster):
    began = time.monotonic()
    with pytest.raises(PreflightError) as caught:
        way.launch(programs.rank, num_processes=cluster.slots + 1)
    assert time.monotonic() - began < 6
    text = str(caught.value)
    assert f"needs {cluster.slots + 1} slots" in text and f"has {cluster.slots}" in text


def test_concurrent_runs(way: Way, cluster: Cluster, moments: Path):
    """Runs of one rank each, all at work at one time, do not see each other."""
    count = cluster.slots
    with ThreadPoolExecutor(count) as pool:
        outcomes = [pool.submit(way.launch, meet, moments, i, count, num_processes=1) for i in range(count)]
        results = [outcome.result(timeout=60) for outcome in outcomes]
    assert [run.values for run in results] == [[(i, "0", "1")] for i in range(count)]
    assert len({run.run_id for run in results}) == count


def meet(folder: Path, index: int, count: int) -> tuple[int, str | None, str | None]:
    (folder / str(index)).touch()
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)
    return index, os.environ.get("RANK"), os.environ.get("WORLD_SIZE")


def test_a_failing_run_beside_another(way: Way, moments: Path):
    with ThreadPoolExecutor(2) as pool:
        lasting = pool.submit(
            way.launch, programs.announce_and_return, moments, moments / "go", num_processes=1
        )
        assert support.wait_until(lambda: (moments / "0").exists(), 60)
        with pytest.raises(TrainingFailed):
            way.launch(programs.raise_it, ValueError, "mine", num_processes=1)
        (moments / "go").touch()
        assert lasting.result(timeout=30).values == [0]


# --- warm servers -------------------------------------------------------------------------------


def servers() -> int:
    """The pid of the forkserver that this rank's agent comes from."""
    agent = os.getppid()
    return int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_next_run_uses_the_same_forkservers(way: Way, cluster: Cluster):
    first = way.launch(servers).values
    assert len(set(first)) == EXECUTORS
    assert set(first) <= support.forkservers()
    # Ranks are numbered by whichever executor has task 0.
    assert sorted(way.launch(servers).values) == sorted(first)


STOPS = """
import json, sys, time
from sparkdist import TorchDistributor
from tests import support
from tests.cluster import clusters
from tests.faults import programs

others = support.forkservers()
spark = clusters.start_session(json.loads(sys.argv[2]))
application = spark.sparkContext.applicationId
assert TorchDistributor(int(sys.argv[1]), local_mode=False).launch(programs.rank).values
mine, executors = support.forkservers() - others, clusters.executors_of(application)
assert len(mine) == len(executors) == clusters.EXECUTORS, (mine, executors)
spark.stop()
left = lambda: (mine | executors) & support.parents().keys()
assert support.wait_until(lambda: not left(), 30), support.describe(left())
assert not support.run_processes(), support.describe(support.run_processes())
print("nothing is left")
"""


@pytest.mark.slow
def test_the_end_of_an_application_leaves_nothing(cluster: Cluster, spark: SparkSession, clean: None):
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", STOPS, str(cluster.slots), json.dumps(cluster.confs)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=110)
    assert done.stdout.endswith("nothing is left\n"), done.stdout + done.stderr


# --- a Spark worker is left as it was ------------------------------------------------------------


def worker_state(items: Iterable[Any]) -> Iterable[tuple[int, dict[str, Any]]]:
    """Tells what a run could have changed in the Spark Python worker that this task runs in."""
    import random
    import resource
    import signal
    import threading
    import warnings

    import numpy

    for _ in items:
        pass
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_open(fd)]
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    children = [pid for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == os.getpid()]
    facts = {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "masks": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Umask")],
        "random": hash(random.getstate()),
        "numpy": numpy.random.get_state()[1].tobytes(),  # type: ignore[index]
        # By kind: a task has a socket of its own, of another number than the one before.
        "descriptors": sorted(re.sub(r"\d+", "N", target) for target in fds),
        "path": list(sys.path),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "kernel threads": len(os.listdir("/proc/self/task")),
        "children": children,
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)],
        "filters of warnings": len(warnings.filters),
        "torch": "torch" in sys.modules,
        "hooks": [sys.excepthook is sys.__excepthook__, sys.stdout is sys.__stdout__],
    }
    yield os.getpid(), facts


def fd_is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")  # that of the listing itself is closed by now


def parent_of(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def states(spark: SparkSession, cluster: Cluster) -> dict[int, dict[str, Any]]:
    """One look at the worker of every slot: a barrier job has all of them at one time."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    rdd = spark.sparkContext.parallelize(range(cluster.slots), cluster.slots)
    return dict(rdd.barrier().mapPartitions(worker_state).collect())


def test_a_spark_worker_is_left_as_it_was(either: Way, cluster: Cluster, spark: SparkSession, tmp_path: Path):
    either.launch(programs.rank)
    states(spark, cluster)  # what a first look imports
    before = states(spark, cluster)
    assert len(before) == cluster.slots
    assert either.launch(programs.rank).values
    either.failure_of_rank_1(programs.raise_it, ValueError, "boom")
    either.launch(change_everything, str(tmp_path))
    after = states(spark, cluster)
    assert after.keys() == before.keys()  # the workers were used again
    for pid, state in before.items():
        for name, value in state.items():
            assert after[pid][name] == value, name


def change_everything(folder: str) -> None:
    """A rank may do to itself what it likes."""
    import random
    import signal

    os.environ["CHANGED"] = "yes"
    os.chdir(folder)
    os.umask(0o77)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    random.seed(0)
    sys.path.insert(0, folder)


@pytest.mark.slow
def test_runs_of_two_frameworks_and_a_job_of_sparks_own(way: Way, cluster: Cluster, spark: SparkSession):
    plain = Launcher("plain", num_processes=cluster.slots, timeout=60)
    ranks = list(range(cluster.slots))
    for _ in range(2):
        assert plain.launch(programs.rank).values == ranks
        assert spark.range(100).count() == 100
        assert way.launch(programs.rank).values == ranks


def cores_and_node() -> tuple[str, str]:
    return os.environ["OMP_NUM_THREADS"], os.environ["GROUP_RANK"]


def test_resources_for_the_tasks_of_one_run(way: Way, cluster: Cluster, spark: SparkSession):
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(cluster.cores)).build
    values = way.launch(cores_and_node, num_processes=EXECUTORS, resources=profile).values
    assert values == [(str(cluster.cores), str(node)) for node in range(EXECUTORS)]
    greedy = ResourceProfileBuilder().require(TaskResourceRequests().cpus(cluster.cores + 1)).build
    with pytest.raises(PreflightError, match="resources= cannot be used on this cluster"):
        way.launch(cores_and_node, num_processes=1, resources=greedy)
