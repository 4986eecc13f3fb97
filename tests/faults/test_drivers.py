"""The session, or the driver, ends under a run: in drivers of their own."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests import support
from tests.faults.drivers import driver, end, pids_of


@pytest.mark.slow
def test_a_session_that_another_thread_stops(where: str, clean: None, tmp_path: Path):
    with driver(where) as made:
        made.tell("wait", tmp_path, stop=True)
        pids = pids_of(tmp_path)
        told = time.time()
        said = made.hear()
        end(pids, 1)
        assert said["error"] == "TrainingFailed"
        assert "the gang was lost: " in said["text"]
        assert "session was stopped" in said["text"] or "SparkContext was shut down" in said["text"]
        assert said["at"] - told < 8
        said = made.does("ranks", settings={"local_mode": False})
        assert (said["error"], said["after"] < 5) == ("PreflightError", True)
        said = made.does("ranks")  # on the driver: there is no session
        assert said.get("values") == [0, 1], said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_is_killed(where: str, clean: None, tmp_path: Path, number: signal.Signals):
    others = support.forkservers()
    with driver(where) as made:
        made.tell("wait", tmp_path)
        pids = pids_of(tmp_path)
        made.process.send_signal(number)
        end(pids, 5)
        assert support.wait_until(lambda: support.forkservers() <= others, 10)


@pytest.mark.slow
def test_speculation(where: str, clean: None, tmp_path: Path):
    """Spark would start a second copy of a task that takes longer than others; not of a gang's."""
    confs = {
        "": "true",
        ".interval": "50ms",
        ".multiplier": "1.01",
        ".quantile": "0.1",
        ".minTaskRuntime": "50ms",
    }
    with driver(where, *(f"spark.speculation{name}={value}" for name, value in confs.items())) as made:
        for _ in range(2):
            assert made.does("uneven", tmp_path)["values"] == [0, 1]
        # Each rank wrote a file at each start.
        assert len(list(tmp_path.iterdir())) == 4
        assert made.does("fail")["text"].startswith("rank 1 raised ValueError")
