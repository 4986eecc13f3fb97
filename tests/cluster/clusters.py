"""The clusters that tests run on: Spark's own local-cluster, and a standalone master with two workers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdist.executor import process
from tests import support

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXECUTORS = 2
START_TIME = 90.0  # s that a JVM gets to come up on a busy machine


@dataclass(frozen=True)
class Cluster:
    """A cluster of two executors, and how an application gets there.

    Attributes:
        kind: Its name in the ids of tests.
        master: Spark's address of it.
        cores: Cores, and so slots, of each executor.
    """

    kind: str
    master: str
    cores: int

    @property
    def slots(self) -> int:
        """How many ranks fit."""
        return EXECUTORS * self.cores

    @property
    def confs(self) -> dict[str, str]:
        """What an application sets there, so that several fit on a small machine."""
        return {
            "spark.master": self.master,
            "spark.driver.host": "127.0.0.1",
            "spark.executor.cores": str(self.cores),
            "spark.executor.memory": "512m",
            # A worker of the standalone kind has room for a second application.
            "spark.cores.max": str(self.slots),
            "spark.sql.shuffle.partitions": "2",
            # One that is told to go ends a second later, whatever it runs.
            "spark.decommission.enabled": "true",
            "spark.executor.decommission.forceKillTimeout": "1s",
            "spark.storage.decommission.enabled": "false",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }


def start_session(confs: Mapping[str, str]) -> SparkSession:
    """Starts a session and waits until all its executors are there."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("sparkdist tests on a cluster")
    for name, value in confs.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    if not support.wait_until(lambda: executor_count(session) == EXECUTORS, START_TIME):
        raise TimeoutError(f"{executor_count(session)} of {EXECUTORS} executors came up")
    return session


def executor_count(session: SparkSession) -> int:
    """How many executors have registered; the driver is in the list, too."""
    return len(session.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1


def executor_jvms(session: SparkSession) -> set[int]:
    """The pids of a session's executors on this machine."""
    return executors_of(session.sparkContext.applicationId)


def executors_of(application: str) -> set[int]:
    """The pids of an application's executors on this machine."""
    lines = {pid: support.arguments(pid) for pid in support.session_processes()}
    return {
        pid
        for pid, words in lines.items()
        if any(word.endswith("CoarseGrainedExecutorBackend") for word in words) and application in words
    }


# --- the standalone kind ------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """Where a process of a cluster runs.

    Attributes:
        address: The host's.
        before: A command that others go behind, to be run there.
    """

    address: str
    before: tuple[str, ...] = ()


LOOPBACK = Host("127.0.0.1")


@contextmanager
def standalone(
    folder: Path, master: Host = LOOPBACK, workers: Sequence[Host] = (LOOPBACK,) * EXECUTORS
) -> Iterator[str]:
    """Starts a master and its workers, which end with this; yields the master's address.

    Args:
        folder: For logs, work folders and local folders.
        master: Where the master runs.
        workers: Where the workers run.
    """
    with ExitStack() as stack:
        command = ["org.apache.spark.deploy.master.Master", "--host", master.address]
        command += ["--port", "0", "--webui-port", "0"]
        log = stack.enter_context(_service(folder / "master", master, command))
        url = _await(log, r"Starting Spark master at (spark://\S+)")
        logs = []
        for index, host in enumerate(workers):
            worker = ["org.apache.spark.deploy.worker.Worker", "--host", host.address, "--port", "0"]
            # Cores are only counted: room for two applications.
            worker += ["--webui-port", "0", "--cores", "4", "--memory", "2g", url]
            logs.append(stack.enter_context(_service(folder / f"worker-{index}", host, worker)))
        for log in logs:
            _await(log, r"(Successfully registered) with master")
        yield url


@contextmanager
def _service(folder: Path, host: Host, command: Sequence[str]) -> Iterator[Path]:
    from pyspark.find_spark_home import _find_spark_home

    folder.mkdir()
    home, log = Path(_find_spark_home()), folder / "log"
    environ = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
    }
    with log.open("w") as output:
        running = subprocess.Popen(
            [*host.before, str(home / "bin/spark-class"), *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Whatever becomes of this process. A killed worker's executors end by themselves.
            preexec_fn=partial(process.die_with_parent, os.getpid()),
        )
    try:
        yield log
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _await(log: Path, pattern: str) -> str:
    """Waits for a line of a log and returns the pattern's group."""
    found: list[str] = []

    def look() -> bool:
        found[:] = re.findall(pattern, log.read_text())
        return bool(found)

    if not support.wait_until(look, START_TIME):
        raise TimeoutError(f"{pattern!r} is not in this log:\n{log.read_text()[-4000:]}")
    return found[0]
