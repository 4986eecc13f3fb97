"""The Spark sessions of the tests: a process holds one at a time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdist.driver.local import own_folder
from sparkdist.executor.warm import LIFELINE
from tests import support

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_END_TIME = 15.0  # s; a server looks once a second whether it is still wanted


def start(connect: bool) -> SparkSession:
    """Starts a session with two slots: a classic one, or a client whose server is on this host."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    if connect:
        # Without it each remote("local") server of this machine wants the same port.
        os.environ.setdefault("SPARK_TESTING", "1")
        builder = builder.remote("local[2]")
    else:
        builder = builder.master("local[2]").appName("sparkdist tests")
    confs = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": tempfile.gettempdir(),
        "spark.sql.shuffle.partitions": "2",
    }
    for name, value in confs.items():
        builder = builder.config(name, value)
    with warnings.catch_warnings():
        # A client tells its new server all of them, and then again those that it may not change any more.
        warnings.filterwarnings("ignore", "Failed to set")
        return builder.getOrCreate()


def stop(session: SparkSession) -> None:
    """Stops a session and asserts that no process of a run outlives it, warm servers included."""
    session.stop()
    assert support.wait_until(lambda: not outliving(), _END_TIME), support.describe(outliving())
    # Those of local_mode go when this process does, and that is when their folder goes.
    shutil.rmtree(own_folder(os.getpid()))
    assert support.wait_until(lambda: not support.marked(), _END_TIME), support.describe(support.marked())


def outliving() -> set[int]:
    """The processes of runs, warm servers included, that have to end with Spark's application."""
    servers = support.forkservers()
    return {pid for pid in support.marked() if not (pid in servers and _serves_the_driver_alone(pid))}


def _serves_the_driver_alone(server: int) -> bool:
    """Says whether a warm server has been used in local_mode only: no Spark application had a part in it."""
    words = support.arguments(server)
    if not words:
        return False  # it has just ended
    arguments = json.loads(words[-1])
    if arguments["parent"][0] != os.getpid():
        return False
    return not list(Path(arguments["folder"]).glob(f"{LIFELINE}*"))
