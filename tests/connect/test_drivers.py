"""What ends a session, a server or a driver, or needs confs of its own: each in a driver of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import support
from tests.faults.drivers import driver, end, pids_of

REMOTE = "remote=local[2]"


@pytest.mark.slow
def test_a_server_that_is_killed(tmp_path: Path):
    with driver(REMOTE) as made:
        made.tell("wait", tmp_path)
        pids = pids_of(tmp_path)
        (server,) = [pid for pid in support.descendants([made.process.pid]) if is_java(pid)]
        killed = time.time()
        os.kill(server, signal.SIGKILL)
        end(pids, 5)
        said = made.hear()
        assert said["error"] == "TrainingFailed"
        assert "the Spark Connect server (localhost) is gone" in said["text"]
        assert said["at"] - killed < 25
        said = made.does("ranks")
        assert (said["error"], said["after"] < 5.5) == ("PreflightError", True)
        assert "does not answer" in said["text"]


def is_java(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text() == "java\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "conf", ["spark.dynamicAllocation.enabled", "spark.ssl.enabled"], ids=lambda conf: conf.split(".")[1]
)
def test_confs_that_are_refused(conf: str):
    with driver(REMOTE, f"{conf}=true") as made:
        said = made.does("ranks")
        assert (said["error"], said["after"] < 5) == ("PreflightError", True)
        assert conf in said["text"]


@pytest.mark.slow
def test_what_must_be_encrypted_on_disk_is_not_sent_as_a_file():
    with driver(REMOTE, "spark.io.encryption.enabled=true") as made:
        said = made.does("large")
        assert said["error"] == "ConfigurationError"
        assert "spark.io.encryption.enabled" in said["text"]
        assert made.does("ranks")["values"] == [0, 1]
