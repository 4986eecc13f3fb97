"""What ranks leave behind, and what becomes of a run whose own processes are killed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparkdist import TrainingFailed
from tests import support
from tests.faults import programs
from tests.faults.ways import Way

PROMPTLY = 10.0  # s; a rank that has returned may take 5 to wind up


@pytest.mark.parametrize(
    "program",
    [programs.leave_a_thread, programs.leave_a_reader_of_stdout, programs.leave_a_data_loader],
    ids=lambda program: program.__name__,
)
def test_what_a_rank_leaves_is_ended(fast: Way, program):
    fast.launch(programs.rank)
    began = time.monotonic()
    assert fast.launch(program).values == [0, 1]
    assert time.monotonic() - began < PROMPTLY
    assert support.wait_until(lambda: not support.run_processes(), 5)


def test_a_daemon_that_a_rank_leaves_is_ended(lean: Way, tmp_path: Path):
    lean.launch(programs.rank)
    began = time.monotonic()
    assert lean.launch(programs.leave_a_daemon, tmp_path).values == [0, 1]
    assert time.monotonic() - began < PROMPTLY
    pids = {int((tmp_path / rank).read_text()) for rank in "01"}
    assert support.wait_until(lambda: not pids & support.parents().keys(), 5), support.describe(pids)


def test_threads_of_ranks_under_torchrun(torchrun: Way):
    began = time.monotonic()
    assert torchrun.launch(programs.leave_a_thread).values == [0, 1]
    assert time.monotonic() - began < PROMPTLY + 5


# --- a process of the run's own is killed -------------------------------------------------------


class Running:
    """A run whose ranks are in their function."""

    def __init__(self, outcome: Future[Any], folder: Path) -> None:
        self.outcome = outcome
        self.go = folder / "go"
        assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(folder)), 60)
        self.rank = int((folder / "0").read_text())
        self.agent = support.parents()[self.rank]
        self.forkserver = support.parents()[self.agent]

    def failure(self) -> TrainingFailed:
        with pytest.raises(TrainingFailed) as caught:
            self.outcome.result(timeout=20)
        return caught.value


@contextmanager
def running(way: Way, folder: Path) -> Iterator[Running]:
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(way.launch, programs.announce_and_return, folder, folder / "go")
        yield Running(outcome, folder)


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
        assert support.wait_until(lambda: run.rank not in support.parents(), 2)
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


# --- output -------------------------------------------------------------------------------------

LINES = 20_000  # of 100 bytes: 2 MB for each rank


@pytest.mark.parametrize(("logs", "ranks"), [("all", {0, 1}), ("rank0", {0}), ("none", set())])
def test_a_megabyte_of_output_each_second(fast: Way, capfd: pytest.CaptureFixture[str], logs, ranks):
    fast.launch(programs.print_lines, LINES, 1.0, logs=logs)
    said = capfd.readouterr()
    for text, first in ((said.out, 0), (said.err, 1)):
        lines = [line for line in text.splitlines() if "......" in line]
        for rank in ranks:
            mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
            expected = [f"[rank {rank}] " + f"{i:08}".ljust(99, ".") for i in range(first, LINES, 2)]
            assert mine == expected
        assert len(lines) == len(ranks) * LINES // 2


def test_output_as_fast_as_ranks_can_print_does_not_stop_them(fast: Way, capfd: pytest.CaptureFixture[str]):
    fast.launch(programs.print_lines, 200_000, 1e9)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank ")]
    assert all(len(line) == 9 + 99 or "dropped" in line for line in lines)
    assert lines[-1].endswith(".")
