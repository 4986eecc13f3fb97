"""The Spark session a run uses, or that there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkdist.errors import PreflightError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_WITHOUT_SPARK = 4_000_000_000  # bytes


def choose(local_mode: bool | None, given: SparkSession | None) -> SparkSession | None:
    """Returns the session whose tasks will hold the ranks, or None for ranks on the driver.

    Args:
        local_mode: True for the driver, False for Spark, None for Spark where a session is active.
        given: The session from the settings.

    Raises:
        PreflightError: Spark was asked for and no usable session is there.
    """
    if local_mode:
        return None
    session = given or _active()
    if session is None:
        if local_mode is None:
            return None
        raise PreflightError(
            "local_mode=False needs a Spark session, and none is active. Start one with "
            "SparkSession.builder.getOrCreate(), or pass spark=, or train on the driver with local_mode=True."
        )
    if is_connect(session):
        raise PreflightError(
            "this is a Spark Connect session, which this version does not run on yet; use a classic "
            "session (SparkSession.builder.master(...)) or local_mode=True"
        )
    if session.sparkContext._jsc is None:
        raise PreflightError("the Spark session has been stopped; start a new one")
    return session


def confs(session: SparkSession) -> Callable[[str], str | None]:
    """Returns how to look up a conf: the application's, or one set in the session while it runs."""
    if is_connect(session):
        return dict(session.conf.getAll).get  # one call to the server for all of them
    return lambda name: session.conf.get(name, None)


def cores_per_task(conf: Callable[[str], str | None], profile: ResourceProfile | None) -> int:
    """Returns the cores that Spark counts for a task of the session, or of a resource profile."""
    requests = profile.taskResources if profile else {}
    return int(requests["cpus"].amount if "cpus" in requests else conf("spark.task.cpus") or 1)


def carry_limit(session: SparkSession | None) -> int:
    """Returns how many bytes of function and arguments can be carried to ranks.

    Spark holds them in the driver's heap on their way: a gigabyte ends a JVM of that size, 600 MB
    do not. Half of the heap leaves room for what else is in it.
    """
    if session is None:
        return _WITHOUT_SPARK
    heap = session.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory()  # type: ignore[union-attr]
    return min(int(heap) // 2, _WITHOUT_SPARK)


def is_local(master: str | None) -> bool:
    """Says whether executors are in the driver's JVM: `local`, `local[n]`, `local[*]`."""
    return master == "local" or bool(master and master.startswith("local["))


def _active() -> SparkSession | None:
    if "pyspark.sql" not in sys.modules:
        return None  # nobody can have started one
    from pyspark.sql import SparkSession

    # The first is the thread's own; a thread that has none sees the application's.
    session = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if session is not None and not is_connect(session) and session.sparkContext._jsc is None:
        return None  # stopped, and so not active
    return session


def is_connect(session: SparkSession) -> bool:
    """Says whether a session is a client of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect")
