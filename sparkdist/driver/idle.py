"""Spark's killer of idle Python workers: to it, a task that trains and sends nothing is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sparkdist.driver.session import Confs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What executors were started with: it counts for all jobs, and for DataFrames where the session says nothing.
_OF_EXECUTORS = "spark.python.worker"
_OF_SESSION = "spark.sql.execution.pyspark.udf"
_KILL = f"{_OF_SESSION}.killOnIdleTimeout"


@dataclass
class _Spared:
    """The runs of a session that need the killer off."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    runs: int = 0
    before: str | None = None


_spared: WeakKeyDictionary[SparkSession, _Spared] = WeakKeyDictionary()
_lock = threading.Lock()


def executors_kill(conf: Confs) -> bool:
    """Says whether executors end Python workers that send nothing for a while, whatever a session says."""
    kills, seconds = (conf(f"{_OF_EXECUTORS}.{what}") for what in ("killOnIdleTimeout", "idleTimeoutSeconds"))
    return (kills or "").lower() == "true" and seconds not in (None, "0", "0s")


@contextmanager
def idle_workers_spared(session: SparkSession, conf: Confs) -> Iterator[None]:
    """Switches the killer off for DataFrames of the session, if it may be on, until no run needs it off."""
    with _lock:
        spared = _spared.setdefault(session, _Spared())
    with spared.lock:
        is_on = spared.runs > 0 or (conf(_KILL) or "").lower() == "true" or executors_kill(conf)
        if is_on:
            if not spared.runs:
                spared.before = conf(_KILL)
            session.conf.set(_KILL, False)
            spared.runs += 1
    try:
        yield
    finally:
        if is_on:
            with spared.lock, suppress(Exception):  # a session that has ended takes it along
                spared.runs -= 1
                if not spared.runs:
                    if spared.before is None:
                        session.conf.unset(_KILL)
                    else:
                        session.conf.set(_KILL, spared.before)
