"""A process of the run's own, or one of Spark's, is killed under it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests import support
from tests.faults.ways import Way, running


def test_the_agent_is_killed(fast: Way, tmp_path: Path):
    with running(fast, tmp_path) as run:
        os.kill(run.agent, signal.SIGKILL)
        killed = time.monotonic()
        error = run.failure()
    assert time.monotonic() - killed < 5
    assert {failure.kind for failure in error.failures.values()} == {"lost"}
    assert "agent was killed" in str(error)


def test_the_forkserver_is_killed(fast: Way, tmp_path: Path):
    """It is needed to start ranks only."""
    with running(fast, tmp_path) as run:
        assert run.forkserver in support.forkservers()
        os.kill(run.forkserver, signal.SIGKILL)
        assert support.wait_until(lambda: run.forkserver not in support.parents(), 5)
        run.go.touch()
        assert run.outcome.result(timeout=20).values == [0, 1]


def test_agent_and_forkserver_are_killed(fast: Way, tmp_path: Path):
    with running(fast, tmp_path) as run:
        for pid in (run.forkserver, run.agent):
            os.kill(pid, signal.SIGKILL)
        error = run.failure()
    assert {failure.kind for failure in error.failures.values()} == {"lost"}


def leading_worker() -> int:
    """The Spark Python worker that leads a gang: the one that listens for its followers."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    inodes = {line.split()[6] for line in lines if re.search(r" @sparkdist-[0-9a-f]+$", line)}
    (pid,) = [
        pid
        for pid in support.session_processes()
        if support.FORKSERVER_MARKER not in support.start_environ(pid) and support.sockets(pid) & inodes
    ]
    return pid


def test_the_spark_worker_is_killed(on_spark: Way, tmp_path: Path):
    with running(on_spark, tmp_path) as run:
        os.kill(leading_worker(), signal.SIGKILL)
        # Not by Spark, which takes seconds: the agent sees its task's socket end.
        assert support.wait_until(lambda: not run.ranks & support.parents().keys(), 2)
        error = run.failure()
    assert {failure.kind for failure in error.failures.values()} == {"lost"}


@pytest.mark.parametrize("fast", ["fast-spark"], indirect=True)
def test_a_following_spark_worker_is_killed(fast: Way, tmp_path: Path):
    with running(fast, tmp_path) as run:
        leader, tree = leading_worker(), support.parents()
        followers = {pid for pid, parent in tree.items() if parent == tree[leader]} - {leader}
        assert followers
        for pid in followers:
            os.kill(pid, signal.SIGKILL)
        error = run.failure()
    assert {failure.kind for failure in error.failures.values()} == {"lost"}


def test_sparks_python_daemon_is_killed(fast_on_spark: Way, pytestconfig: pytest.Config, tmp_path: Path):
    """It is needed to start Spark's workers only; but a server that was started below it ends with it."""
    with running(fast_on_spark, tmp_path) as run:
        daemon = support.parents()[leading_worker()]
        assert "pyspark.daemon" in support.arguments(daemon)
        os.kill(daemon, signal.SIGKILL)
        if pytestconfig.option.connect:
            run.end(2)
            run.loss()
        else:
            assert support.wait_until(lambda: daemon not in support.parents(), 5)
            run.go.touch()
            assert run.outcome.result(timeout=20).values == [0, 1]
