"""What is checked of a session before a job is started."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkdist.driver.session import is_connect, is_local
from sparkdist.errors import ConfigurationError, PreflightError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_REGISTER_TIME = 5.0  # s that executors get to register before there are too few slots
_LOOK_AGAIN = 0.1  # s

Confs = Callable[[str], str | None]


def check(session: SparkSession, conf: Confs, tasks: int, use_gpu: bool | None, ssl_conf: str) -> None:
    """Checks that the session can run a gang of so many tasks.

    On Connect the count of slots is hidden; there the job itself watches for too few.

    Raises:
        ConfigurationError: GPUs were asked for and are not configured.
        PreflightError: It cannot.
    """
    _check_gpus(conf, use_gpu)
    if _is_true(conf("spark.dynamicAllocation.enabled")):
        raise PreflightError(
            "spark.dynamicAllocation.enabled is true, and Spark gives a gang its slots at once only without "
            "it; set it to false"
        )
    if _is_true(conf("spark.ssl.enabled")) and not _is_true(conf(ssl_conf)):
        raise PreflightError(
            "spark.ssl.enabled is true, but what ranks send each other is not encrypted. To train all the "
            f"same set the conf {ssl_conf} to true."
        )
    if not is_connect(session):
        _check_slots(session.sparkContext, tasks)


def _check_gpus(conf: Confs, use_gpu: bool | None) -> None:
    amount = conf("spark.task.resource.gpu.amount")
    if use_gpu and amount is None:
        raise ConfigurationError(
            "use_gpu=True, but this session offers no GPUs to tasks: the conf spark.task.resource.gpu.amount "
            "is not set. Set it, or use_gpu=False (CPU) or None (GPUs where there are any)."
        )
    if use_gpu is not False and amount is not None:
        raise PreflightError(
            f"spark.task.resource.gpu.amount is {amount}, and this version does not hand out Spark's GPUs "
            "yet: use_gpu=False trains on the CPU, local_mode=True on the driver's GPUs"
        )


def _check_slots(context: SparkContext, tasks: int) -> None:
    """Compares with the slots there are; a barrier job too large would wait for ten silent minutes."""
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    # The slots of a local master are all there from the start.
    deadline = time.monotonic() + (0.0 if is_local(context.master) else _REGISTER_TIME)
    while (slots := scala.maxNumConcurrentTasks(profile)) < tasks:
        if time.monotonic() >= deadline:
            raise PreflightError(
                f"the run needs {tasks} slots at once, and the cluster ({context.master}) has {slots}. Ask "
                "for fewer processes, or start Spark with more cores."
            )
        time.sleep(_LOOK_AGAIN)  # Spark has no event for a registered executor


def _is_true(value: str | None) -> bool:
    return (value or "").lower() == "true"
