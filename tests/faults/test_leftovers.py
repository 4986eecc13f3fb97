"""What ranks leave behind: threads, processes, lines of output."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sparkdist.executor import process
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


@pytest.mark.slow
def test_threads_of_ranks_under_torchrun(torchrun: Way):
    began = time.monotonic()
    assert torchrun.launch(programs.leave_a_thread).values == [0, 1]
    assert time.monotonic() - began < PROMPTLY + 5


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


def test_a_rank_that_closes_its_output_costs_its_agent_nothing(fast: Way):
    assert max(fast.launch(close_output_and_rest).values) < 0.2


def close_output_and_rest() -> float:
    """Returns how many seconds of CPU time the agent took in half a second of rest."""
    os.close(1)
    os.close(2)
    before = process.usage(os.getppid()).cpu
    time.sleep(0.5)
    return process.usage(os.getppid()).cpu - before
