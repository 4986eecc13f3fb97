"""Faults on purpose: they come where they were asked for, once, and nowhere else."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import sparkdist
from sparkdist import ConfigurationError, Launcher, Results, TrainingFailed, testing
from sparkdist.driver.board import Board

STEPS = 5


def launch(function: Any, *args: Any, **settings: Any) -> Results:
    settings = {"num_processes": 2, "local_mode": True, "timeout": 60, **settings}
    return Launcher("plain", **settings).launch(function, *args)


def failure(function: Any, *args: Any, **settings: Any) -> TrainingFailed:
    with pytest.raises(TrainingFailed) as caught:
        launch(function, *args, **settings)
    return caught.value


def train(beside: bool = True) -> int:
    """Takes some steps; beside a fault it then waits for its end."""
    rank = sparkdist.context().rank
    for step in range(STEPS):
        sparkdist.report({}, step=step)
    while beside and rank == 0:
        time.sleep(0.01)
    return rank


def steps(board: Board, rank: int) -> list[int | None]:
    return [report.step for report in board.reports if report.rank == rank]


ENDS = {"raise": ("exception", None, None), "kill": ("signal", None, "SIGKILL"), "exit": ("exit", 1, None)}


@pytest.mark.parametrize("after_steps", [0, 3, STEPS])
@pytest.mark.parametrize("how", ENDS)
def test_it_comes_at_its_step(clean, boards, how, after_steps):
    testing.fail(rank=1, attempt=0, after_steps=after_steps, how=how)
    error = failure(train)
    assert list(error.failures) == [1]
    assert (error.root.kind, error.root.exit_code, error.root.signal) == ENDS[how]
    assert steps(boards[-1], 1) == list(range(after_steps))
    if how == "raise":
        assert isinstance(error.root.exception, testing.InjectedFault)
        assert f"rank 1 was to fail after {after_steps} steps of attempt 0" in str(error)
    assert launch(train, False).values == [0, 1]  # it was for one launch


def see_it_stop(folder: Path) -> None:
    """Rank 0 ends when rank 1 has been stopped."""
    name = folder / "pid"
    if sparkdist.context().rank == 1:
        name.with_suffix(".new").write_text(str(os.getpid()))
        name.with_suffix(".new").rename(name)
        train()
    while not name.exists() or Path(f"/proc/{name.read_text()}/stat").read_text().split(") ")[1][0] != "T":
        time.sleep(0.01)
    raise LookupError("it stands still")


def test_a_rank_that_is_stopped_stands_still(clean, boards, tmp_path):
    testing.fail(rank=1, after_steps=2, how="stop")
    error = failure(see_it_stop, tmp_path)
    assert isinstance(error.root.exception, LookupError) and error.root.rank == 0
    assert steps(boards[-1], 1) == [0, 1]


def test_what_does_not_come(clean):
    testing.fail(rank=1, attempt=1)  # there is but one
    testing.fail(rank=0, attempt=0, after_steps=STEPS + 1)  # it ends before
    results = launch(train, False)
    assert results.values == [0, 1] and len(results.metrics) == 2 * STEPS


def test_each_attempt_has_its_own(clean):
    testing.fail(rank=1, attempt=0, after_steps=3, how="kill")
    testing.fail(rank=1, attempt=1, after_steps=0)
    testing.fail(rank=0, attempt=1, after_steps=STEPS + 1)
    results = launch(train_when_alone, max_restarts=2)
    assert [attempt.failure and attempt.failure.kind for attempt in results.attempts] == [
        "signal",
        "exception",
        None,
    ]
    mine = [(report.attempt, report.step) for report in results.metrics if report.rank == 1]
    assert mine == [(0, 0), (0, 1), (0, 2), *((2, step) for step in range(STEPS))]


def train_when_alone() -> int:
    return train(beside=sparkdist.context().attempt < 2)


def test_several_add_up_and_the_first_to_come_wins(clean, boards):
    testing.fail(rank=1, after_steps=4, how="kill")
    testing.fail(rank=1, after_steps=2, how="raise")
    testing.fail(rank=0, attempt=7)
    assert failure(train).root.kind == "exception"
    assert steps(boards[-1], 1) == [0, 1]


def test_a_with_statement_holds_for_every_launch_inside(clean):
    with testing.fail(rank=1, how="exit"):
        assert [failure(train).root.exit_code for _ in range(2)] == [1, 1]
    assert launch(train, False).values == [0, 1]
    with testing.fail(rank=1):
        pass  # nothing is left of it
    assert launch(train, False).values == [0, 1]


def test_other_threads_are_not_meant(clean):
    testing.fail(rank=1)
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.extend(launch(train, False).values))
    thread.start()
    thread.join()
    assert values == [0, 1]
    assert failure(train).root.rank == 1


def fail_by_itself(attempt: int, after_steps: int, first: int = 0) -> int:
    for step in range(first):
        sparkdist.report({}, step=step)
    sparkdist.testing.fail(rank=1, attempt=attempt, after_steps=after_steps)
    for step in range(first, STEPS):
        sparkdist.report({}, step=step)
    return sparkdist.context().rank


@pytest.mark.parametrize(
    ("after_steps", "first", "told"), [(0, 0, 0), (3, 0, 3), (3, 2, 3), (3, 3, 3), (2, 4, 4)]
)
def test_a_rank_may_ask_for_it_itself(clean, boards, after_steps, first, told):
    error = failure(fail_by_itself, 0, after_steps, first)
    assert error.root.rank == 1 and isinstance(error.root.exception, testing.InjectedFault)
    assert steps(boards[-1], 1) == list(range(told))


def test_a_rank_that_is_not_meant_or_has_left_the_statement(clean):
    assert launch(fail_by_itself, 1, 2).values == [0, 1]

    def leave():
        with testing.fail(rank=sparkdist.context().rank, after_steps=2):
            sparkdist.report({})
        sparkdist.report({})

    assert len(launch(leave).metrics) == 4


def test_on_spark(spark, clean, boards):
    testing.fail(rank=1, after_steps=3, how="kill")
    assert failure(train, local_mode=False).root.signal == "SIGKILL"
    assert steps(boards[-1], 1) == [0, 1, 2]


@pytest.mark.parametrize("launcher", ["fast", "torchrun"])
def test_in_a_script(clean, tmp_path: Path, boards, launcher):
    script = tmp_path / "train.py"
    script.write_text(
        f"import sparkdist, time\nfor step in range({STEPS}): sparkdist.report({{}}, step=step)\n"
    )
    testing.fail(rank=0, after_steps=3, how="kill")
    with pytest.raises(TrainingFailed) as caught:
        Launcher("torch", local_mode=True, launcher=launcher).launch(script)
    assert caught.value.root.signal == "SIGKILL"
    assert steps(boards[-1], 0) == [0, 1, 2]


WRONG: list[dict[str, Any]] = [
    *({"rank": value} for value in (-1, True, 1.0, "1", None)),
    *({"rank": 0, "attempt": value} for value in (-1, True, 1.5)),
    *({"rank": 0, "after_steps": value} for value in (-1, False, "3")),
    *({"rank": 0, "how": value} for value in ("crash", None, ["kill"])),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_arguments_are_refused_and_arm_nothing(wrong):
    *_, (name, value) = wrong.items()
    with pytest.raises(ConfigurationError) as caught:
        testing.fail(**wrong)
    assert name in str(caught.value) and repr(value) in str(caught.value)
    assert testing.take(1) == ()


def test_a_rank_beyond_the_gang_is_refused_before_anything_starts_and_forgotten(clean, boards):
    testing.fail(rank=2)
    with pytest.raises(ConfigurationError, match=r"no rank=2 in a gang of 2; name one from 0 to 1"):
        launch(train, False)
    assert boards == []
    assert launch(train, False).values == [0, 1]


def test_the_fault_pickles():
    error = pickle.loads(pickle.dumps(testing.InjectedFault("rank 1")))
    assert isinstance(error, RuntimeError) and str(error) == "rank 1"


def test_it_is_there_without_an_import_of_its_own():
    code = "import sparkdist; sparkdist.testing.fail(0); print(len(sparkdist.testing.take(1)))"
    root = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
