"""What ends a session, a server or a driver, or needs confs of its own: each in a driver of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.faults.drivers import Driver, driver

REMOTE = ("local[2]", "spark.ui.enabled=false")


def pids_of(folder: Path) -> set[int]:
    """Waits until both ranks have announced themselves."""
    assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(folder)), 60)
    return {int((folder / rank).read_text()) for rank in "01"}


def dead(pids: set[int]) -> bool:
    return not pids & support.parents().keys()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Driver]:
    with driver(*REMOTE) as made:
        yield made


@pytest.mark.parametrize("again", [0, 1])
def test_ctrl_c(lasting: Driver, tmp_path: Path, again):
    lasting.tell("wait", tmp_path)
    pids = pids_of(tmp_path)
    interrupted = time.time()
    lasting.process.send_signal(signal.SIGINT)
    assert support.wait_until(lambda: dead(pids), 5), support.describe(pids)
    said = lasting.hear()
    assert (said["error"], said["restored"]) == ("KeyboardInterrupt", True)
    assert said["at"] - interrupted < 8
    assert lasting.does("ranks")["values"] == [0, 1]


@pytest.mark.slow
def test_a_session_that_another_thread_stops(tmp_path: Path):
    with driver(*REMOTE) as made:
        made.tell("wait", tmp_path, stop=True)
        pids = pids_of(tmp_path)
        told = time.time()
        said = made.hear()
        assert said["error"] == "TrainingFailed"
        assert "the gang was lost: the Spark session was stopped" in said["text"]
        assert said["at"] - told < 8
        assert support.wait_until(lambda: dead(pids), 5), support.describe(pids)
        said = made.does("ranks", settings={"local_mode": False})
        assert (said["error"], said["after"] < 5) == ("PreflightError", True)
        said = made.does("ranks")  # on the driver: there is no session
        assert said.get("values") == [0, 1], said


@pytest.mark.slow
def test_a_server_that_is_killed(tmp_path: Path):
    with driver(*REMOTE) as made:
        made.tell("wait", tmp_path)
        pids = pids_of(tmp_path)
        (server,) = [pid for pid in support.descendants([made.process.pid]) if is_java(pid)]
        killed = time.time()
        os.kill(server, signal.SIGKILL)
        assert support.wait_until(lambda: dead(pids), 5), support.describe(pids)
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
def test_a_driver_that_is_killed(tmp_path: Path):
    with driver(*REMOTE) as made:
        made.tell("wait", tmp_path)
        pids = pids_of(tmp_path)
        made.process.kill()
    assert support.wait_until(lambda: dead(pids), 5), support.describe(pids)
    assert support.wait_until(lambda: not support.run_processes(), 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "conf", ["spark.dynamicAllocation.enabled", "spark.ssl.enabled"], ids=lambda conf: conf.split(".")[1]
)
def test_confs_that_are_refused(conf: str):
    with driver(*REMOTE, f"{conf}=true") as made:
        said = made.does("ranks")
        assert (said["error"], said["after"] < 5) == ("PreflightError", True)
        assert conf in said["text"]


@pytest.mark.slow
def test_what_must_be_encrypted_on_disk_is_not_sent_as_a_file():
    with driver(*REMOTE, "spark.io.encryption.enabled=true") as made:
        said = made.does("large")
        assert said["error"] == "ConfigurationError"
        assert "spark.io.encryption.enabled" in said["text"]
        assert made.does("ranks")["values"] == [0, 1]
