"""What is checked of a session before a job is started."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

from sparkdist.driver.devices import TASK_GPUS
from sparkdist.driver.outcome import message_of
from sparkdist.driver.session import Confs, is_connect, is_local
from sparkdist.errors import PreflightError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_REGISTER_TIME = 5.0  # s that executors get to register before there are too few slots
_LOOK_AGAIN = 0.1  # s
_ENCRYPTION = ("spark.network.crypto.enabled", "spark.io.encryption.enabled")


def check(
    session: SparkSession,
    conf: Confs,
    tasks: int,
    gpus: int,
    profile: ResourceProfile | None,
    ssl_conf: str,
) -> None:
    """Checks that the session can run a gang.

    Args:
        session: The session.
        conf: Looks up its confs.
        tasks: Spark tasks that the gang needs at once.
        gpus: GPUs in each of them.
        profile: Their resource profile.
        ssl_conf: Name of the conf that allows training where spark.ssl.enabled is true.

    On Connect the count of slots is hidden; there the job itself watches for too few.

    Raises:
        PreflightError: It cannot.
    """
    master = conf("spark.master")
    if is_local(master) and conf(TASK_GPUS):
        raise PreflightError(
            f"{TASK_GPUS} is set, and a local master ({master}) has no GPUs to give: every job of "
            "this session would wait for ever. Start Spark without it, and train on the driver's GPUs with "
            "local_mode=True."
        )
    if _is_true(conf("spark.dynamicAllocation.enabled")):
        raise PreflightError(
            "spark.dynamicAllocation.enabled is true, and Spark gives a gang its slots at once only without "
            "it; set it to false"
        )
    _check_encryption(conf, ssl_conf)
    _check_memory(conf, gpus)
    if not is_connect(session):
        _check_slots(session.sparkContext, tasks, profile)


def _check_encryption(conf: Confs, ssl_conf: str) -> None:
    if _is_true(conf("spark.ssl.enabled")) and not _is_true(conf(ssl_conf)):
        raise PreflightError(
            "spark.ssl.enabled is true, but what ranks send each other is not encrypted. To train all the "
            f"same set the conf {ssl_conf} to true."
        )
    encrypted = [name for name in _ENCRYPTION if _is_true(conf(name))]
    if encrypted:
        warnings.warn(
            f"{' and '.join(encrypted)} does not cover what ranks send each other: collectives, the store, "
            "and what the control channel carries of logs and outcomes are not encrypted",
            stacklevel=2,
        )


def _check_memory(conf: Confs, gpus: int) -> None:
    limit = conf("spark.executor.pyspark.memory")
    if not limit:
        return
    text = (
        f"spark.executor.pyspark.memory={limit} limits the address space of every rank, of which a framework "
        "takes far more than memory"
    )
    if gpus:
        raise PreflightError(f"{text}, with GPUs more than there can be; start Spark without it")
    warnings.warn(f"{text}: ranks may fail to allocate. Start Spark without it.", stacklevel=2)


def _check_slots(context: SparkContext, tasks: int, profile: ResourceProfile | None) -> None:
    """Compares with the slots there are; a barrier job too large would wait for ten silent minutes."""
    scala = context._jsc.sc()
    java_profile = scala.resourceProfileManager().defaultResourceProfile()
    if profile is not None:
        java_profile = _register(context, profile)
    # The slots of a local master are all there from the start.
    deadline = time.monotonic() + (0.0 if is_local(context.master) else _REGISTER_TIME)
    while (slots := scala.maxNumConcurrentTasks(java_profile)) < tasks:
        if time.monotonic() >= deadline:
            raise PreflightError(
                f"the run needs {tasks} slots at once, and the cluster ({context.master}) has {slots}. Ask "
                "for fewer processes, or start Spark with more cores."
            )
        time.sleep(_LOOK_AGAIN)  # Spark has no event for a registered executor


def _register(context: SparkContext, profile: ResourceProfile) -> Any:
    """Returns Spark's own object of a resource profile; Spark checks there whether it can be used."""
    try:
        return context.parallelize([0], 1).withResources(profile)._jrdd.rdd().getResourceProfile()
    except Exception as error:
        raise PreflightError(f"resources= cannot be used on this cluster: {message_of(error)}") from error


def _is_true(value: str | None) -> bool:
    return (value or "").lower() == "true"
