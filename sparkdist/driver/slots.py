"""A cluster's slots: how many tasks of a gang it can run at once, and the wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkdist.driver.devices import TASK_GPUS, gpus_per_task
from sparkdist.driver.session import (
    Confs,
    choose,
    confs,
    cores_per_task,
    is_connect,
    is_local,
    is_stopped,
    message_of,
    server_answers,
)
from sparkdist.errors import PreflightError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_REGISTER_TIME = 5.0  # s that executors get to register before there are too few slots
_LOOK_AGAIN = 0.1  # s; Spark has no event for a registered executor
_ANSWER_TIME = 1.0  # s
_LOOK_AGAIN_ON_CONNECT = 1.0  # s; every look is a small query there

# Confs that say how many partitions a range has, where that would be the number of cores, or that have
# something else than cores decide.
_HIDING = ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism", TASK_GPUS)


class Slots:
    """The slots that a session's cluster has for tasks of a gang, free or not.

    Args:
        session: The session.
        conf: Looks up its confs.
        profile: The tasks' resource profile.

    Raises:
        PreflightError: Spark does not take the profile.
    """

    def __init__(self, session: SparkSession, conf: Confs, profile: ResourceProfile | None) -> None:
        self._session = session
        self._master = conf("spark.master")
        self._is_connect = is_connect(session)
        self._count: Callable[[], int | None] = (
            (lambda: _of_cores(session, conf, profile))
            if self._is_connect
            else _classic_counter(session.sparkContext, profile)
        )

    def count(self) -> int | None:
        """Returns how many there are, free or not; None where nobody can tell, or not now."""
        if self._is_connect and not server_answers(self._session, _ANSWER_TIME):
            return None  # its client would try for ten minutes
        try:
            return self._count()
        except Exception:  # there is no JVM, or no session, any more: the job will say so
            return None

    def take(self, least: int, most: int, resize_wait: float, limit: float) -> int:
        """Returns how many tasks a run's first gang may have; see `wait`."""
        if self._is_connect and least == most:
            return most  # the job itself watches for too few, which costs no query
        patience = max(_REGISTER_TIME, resize_wait if least < most else 0.0)
        return self.wait(least, most, resize_wait, min(patience, limit))

    def wait(self, least: int, most: int, resize_wait: float, patience: float) -> int:
        """Waits for a gang's slots.

        Args:
            least: Tasks that the gang needs.
            most: Tasks that it would have.
            resize_wait: Seconds after which fewer than `most` will do.
            patience: Seconds after which there are too few.

        Returns:
            How many tasks it may have; `most` where Connect hides how many slots there are.

        Raises:
            PreflightError: There are too few, or the session was stopped.
        """
        began = time.monotonic()
        while True:
            if is_stopped(self._session):
                raise PreflightError("the Spark session has been stopped")
            slots = self.count()
            if slots is None or slots >= most:
                break
            waited = time.monotonic() - began
            is_final = is_local(self._master)  # the slots of a local master are all there from the start
            if slots >= least and (waited >= resize_wait or is_final):
                return slots
            if slots < least and (waited >= patience or is_final):
                raise PreflightError(too_few(least, f"({self._master}) has {slots}"))
            time.sleep(_LOOK_AGAIN_ON_CONNECT if self._is_connect else _LOOK_AGAIN)
        if slots is None and least < most:
            raise PreflightError(
                "min_processes: this session does not tell how many slots there are; on Connect that takes "
                f"one without resources=, {', '.join(_HIDING)}. Leave min_processes out."
            )
        return most


def all_slots(
    spark: SparkSession | None, profile: ResourceProfile | None, use_gpu: bool | None = None
) -> int:
    """Returns how many ranks fill a cluster: one per slot, or one per GPU of its slots.

    Args:
        spark: The session; None for the active one.
        profile: The tasks' resource profile.
        use_gpu: As `Launcher` takes it: False for one per slot though it has GPUs.

    Raises:
        ConfigurationError: The slots have no GPUs, and are to, or not whole ones.
        PreflightError: There is no usable session, it has no slots, or it does not tell how many.
    """
    session = choose(False, spark)
    assert session
    conf = confs(session)
    gpus = gpus_per_task(use_gpu, 0, conf, profile)
    slots = Slots(session, conf, profile)
    slots.wait(1, 1, 0.0, _REGISTER_TIME)  # executors of a new application may be registering
    count = slots.count()
    if count is None:
        raise PreflightError(
            "this session does not tell how many slots there are; on Connect that takes one without "
            f"resources=, {', '.join(_HIDING)}. Name the number of ranks."
        )
    return count * max(1, gpus)


def too_few(needed: int, has: str) -> str:
    """Returns what to say of a cluster that has too few slots, and how many it has."""
    return (
        f"the run needs {needed} slots at once, and the cluster {has}. Ask for fewer processes, or start "
        "Spark with more cores."
    )


def _classic_counter(context: SparkContext, profile: ResourceProfile | None) -> Callable[[], int]:
    scala = context._jsc.sc()
    java_profile = scala.resourceProfileManager().defaultResourceProfile()
    if profile is not None:
        java_profile = _register(context, profile)
    return lambda: int(scala.maxNumConcurrentTasks(java_profile))


def _register(context: SparkContext, profile: ResourceProfile) -> Any:
    """Returns Spark's own object of a resource profile; Spark checks there whether it can be used."""
    try:
        return context.parallelize([0], 1).withResources(profile)._jrdd.rdd().getResourceProfile()
    except Exception as error:
        raise PreflightError(f"resources= cannot be used on this cluster: {message_of(error)}") from error


def _of_cores(session: SparkSession, conf: Confs, profile: ResourceProfile | None) -> int | None:
    cores = connect_cores(session, conf, profile)
    return None if cores is None else cores // cores_per_task(conf, profile)


def connect_cores(session: SparkSession, conf: Confs, profile: ResourceProfile | None) -> int | None:
    """Returns how many cores a cluster behind Connect has, or None where that is hidden or does not decide.

    By default that is the number of partitions of a range, which its plan shows.
    """
    if profile or any(map(conf, _HIDING)):
        return None
    plan = str(session.sql("EXPLAIN SELECT * FROM range(10)").collect()[0][0])
    _, found, splits = plan.partition("splits=")
    return int(splits.partition(")")[0]) if found else None
