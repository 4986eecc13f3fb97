"""What is checked of a session before a job is started."""

from __future__ import annotations

import warnings

from sparkdist.driver.devices import TASK_GPUS
from sparkdist.driver.session import Confs, is_local
from sparkdist.errors import PreflightError

_ENCRYPTION = ("spark.network.crypto.enabled", "spark.io.encryption.enabled")


def check(conf: Confs, gpus: int, ssl_conf: str) -> None:
    """Checks that a session can run a gang, but for the slots it needs.

    Args:
        conf: Looks up its confs.
        gpus: GPUs in each of the gang's tasks.
        ssl_conf: Name of the conf that allows training where spark.ssl.enabled is true.

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


def _is_true(value: str | None) -> bool:
    return (value or "").lower() == "true"
