"""Spark's killer of idle Python workers: to it, a task that trains and sends nothing is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdist.driver.session import Confs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What may be set in a session, and only for DataFrames; without it, the application's counts for all jobs.
_KILL = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"
_SECONDS = "spark.sql.execution.pyspark.udf.idleTimeoutSeconds"
_OF_APPLICATION = {
    _KILL: "spark.python.worker.killOnIdleTimeout",
    _SECONDS: "spark.python.worker.idleTimeoutSeconds",
}

_lock = threading.Lock()
_spared: dict[int, list[str | None]] = {}  # by session: for each run what the conf was before the first


def kills_idle_workers(conf: Confs) -> bool:
    """Says whether a session has Python workers killed that send nothing for a while."""

    def look_up(name: str) -> str:
        return conf(name) or conf(_OF_APPLICATION[name]) or ""

    return look_up(_KILL).lower() == "true" and look_up(_SECONDS) not in ("", "0", "0s")


@contextmanager
def idle_workers_spared(session: SparkSession, conf: Confs) -> Iterator[None]:
    """Switches the killer off for DataFrames of the session, if it is on, until no run needs it off."""
    with _lock:
        befores = _spared.get(id(session), [])
        is_spared = bool(befores) or kills_idle_workers(conf)
        if is_spared:
            _spared[id(session)] = [*befores, befores[0] if befores else conf(_KILL)]
            session.conf.set(_KILL, False)
    try:
        yield
    finally:
        if is_spared:
            with _lock:
                before = _spared[id(session)].pop()
                if not _spared[id(session)]:
                    del _spared[id(session)]
                    session.conf.unset(_KILL) if before is None else session.conf.set(_KILL, before)
