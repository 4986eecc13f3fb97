"""Ranks do nothing for `stall_timeout`: the error names those that their peers wait for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from sparkdist import TrainingFailed, TrainingTimeout
from tests.faults import programs
from tests.faults.ways import PROMPT, Way

LIMIT = 1.0  # s


def stall_of_rank_1(way: Way, beside: Any, fault: Any, *args: Any) -> TrainingFailed:
    """Launches a fault in rank 1, which alone is to be blamed, and promptly."""
    error = way.failure(beside, way.moment, fault, *args, stall_timeout=LIMIT)
    assert LIMIT <= time.time() - os.stat(way.moment).st_mtime < LIMIT + PROMPT
    assert error.failures.keys() == {1}
    assert error.root.kind == "stalled"
    assert str(error).startswith("rank 1 stalled: it has done nothing for ")
    assert error.stacks.keys() == {0, 1}
    for rank, stack in error.stacks.items():
        assert f"--- rank {rank}:\n{stack.rstrip()}" in str(error)
    return error


def stall_of_all(way: Way, program: Any, **settings: Any) -> TrainingFailed:
    error = way.failure(program, stall_timeout=LIMIT, **settings)
    assert {failure.kind for failure in error.failures.values()} == {"stalled"}
    assert "waited for each other" in str(error)
    return error


# --- who is to blame ----------------------------------------------------------------------------


def test_a_stopped_rank_beside_a_collective(fast: Way):
    error = stall_of_rank_1(fast, programs.beside_a_collective, programs.say_and_stop, "about to stop")
    assert "in barrier" in error.stacks[0]
    assert "is stopped" in error.stacks[1] and "is stopped" in error.root.message
    assert error.root.log_tail[-1] == "about to stop"


def test_a_rank_that_sleeps_on_a_lock_beside_a_collective(on_driver: Way):
    error = stall_of_rank_1(on_driver, programs.beside_a_collective, programs.lock_itself_out)
    assert "in lock_itself_out" in error.stacks[1]


def test_a_rank_that_sleeps_and_holds_the_gil(on_driver: Way):
    error = stall_of_rank_1(on_driver, programs.beside_a_collective, programs.sleep_in_c)
    assert "in sleep_in_c" in error.stacks[1]
    assert "is asleep (kernel: " in error.root.message


def test_a_rank_in_uninterruptible_sleep(on_driver: Way, tmp_path: Path):
    error = stall_of_rank_1(
        on_driver, programs.beside_a_collective, programs.sleep_in_the_kernel, tmp_path / "fifo"
    )
    assert "in sleep_in_the_kernel" in error.stacks[1]
    assert "is in uninterruptible sleep" in error.root.message


def test_a_rank_that_sleeps_beside_one_that_computes(on_driver: Way):
    error = on_driver.failure(
        programs.one_each, programs.spin_for_ever, programs.sleep_for_ever, stall_timeout=LIMIT
    )
    assert error.failures.keys() == {1}
    assert error.root.kind == "stalled"
    assert "in spin_for_ever" in error.stacks[0] and "in sleep_for_ever" in error.stacks[1]


@pytest.mark.slow  # making a model imports torch._dynamo
def test_a_rank_that_sleeps_while_others_reduce_gradients(on_driver: Way):
    error = on_driver.failure(programs.reduce_gradients_without_rank_1, stall_timeout=LIMIT)
    assert error.failures.keys() == {1}
    assert "in backward" in error.stacks[0]


# --- all wait -----------------------------------------------------------------------------------


def test_ranks_in_different_collectives(on_driver: Way):
    error = stall_of_all(on_driver, programs.enter_different_collectives)
    assert error.failures.keys() == {0, 1}
    assert "all 2 ranks" in str(error) and "(barrier(): rank 0; all_reduce(): rank 1)" in str(error)


def test_ranks_that_wait_in_c_alone(on_driver: Way):
    error = stall_of_all(on_driver, programs.wait_for_a_key_and_a_tensor)
    assert error.failures.keys() == {0, 1}
    assert "(get(): rank 0; wait(): rank 1)" in str(error)


def test_ranks_that_wait_after_one_has_returned(on_driver: Way):
    error = stall_of_all(on_driver, programs.wait_for_a_key_but_for_rank_1, num_processes=3)
    assert error.failures.keys() == {0, 2}
    assert "in wait()" in str(error)


# --- no stall -----------------------------------------------------------------------------------


def test_ranks_that_wait_for_one_that_computes(fast: Way):
    results = fast.launch(programs.compute_while_others_wait, 2.5 * LIMIT, stall_timeout=LIMIT)
    assert results.values == [0, 1]


def test_ranks_that_take_hardly_any_time(on_driver: Way):
    results = on_driver.launch(programs.do_little, 2.5 * LIMIT, num_processes=3, stall_timeout=LIMIT)
    assert results.values == [0, 1, 2]


def test_a_rank_that_returns_long_before_the_other(on_driver: Way):
    results = on_driver.launch(programs.compute_but_for_rank_1, 2.5 * LIMIT, stall_timeout=LIMIT)
    assert results.values == [0, 1]


# --- other ways ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_sleeps_beside_a_collective_under_torchrun(torchrun: Way):
    error = stall_of_rank_1(torchrun, programs.beside_a_collective, programs.lock_itself_out)
    assert "in barrier" in error.stacks[0] and "in lock_itself_out" in error.stacks[1]


@pytest.mark.slow
def test_ranks_that_wait_in_c_alone_under_torchrun(torchrun: Way):
    error = stall_of_all(torchrun, programs.wait_for_a_key_and_a_tensor)
    assert "(get(): rank 0; wait(): rank 1)" in str(error)


# --- before the function ------------------------------------------------------------------------


def test_a_rank_that_is_stopped_before_the_function(on_driver: Way):
    on_driver.launch(programs.rank)  # warm
    began = time.monotonic()
    with pytest.raises(TrainingTimeout) as caught:
        on_driver.launch(
            programs.take, programs.Unpickled(programs.stop_rank_1), start_timeout=2, stall_timeout=LIMIT
        )
    assert 2 <= time.monotonic() - began < 2 + PROMPT
    assert (caught.value.setting, caught.value.missing) == ("start_timeout", (1,))
    assert "is stopped" in caught.value.stacks[1]
