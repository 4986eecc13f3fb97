"""Restarts of the gang: exactly as many as failures, whatever failed, and none where none may follow."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sparkdist import (
    ConfigurationError,
    Launcher,
    Results,
    TrainingFailed,
    TrainingTimeout,
    testing,
)
from tests import support
from tests.faults import programs
from tests.faults.test_killed import leading_worker
from tests.faults.ways import Way, running


class Flaky(Exception):
    """What a restart may help against."""


class Worse(Flaky):
    """A kind of it."""


def attempt() -> int:
    from sparkdist import context

    assert os.environ["SPARKDIST_ATTEMPT"] == str(context().attempt)
    return context().attempt


def fail_at_first(failures: int, how: str = "raise") -> tuple[int, int]:
    """Rank 1 fails in the first attempts, beside a rank that waits for ever."""
    if attempt() < failures:
        if programs.rank() == 0:
            programs.sleep_for_ever()
        end(how)
    return programs.rank(), attempt()


def end(how: str) -> NoReturn:
    if how == "raise":
        raise Worse(f"attempt {attempt()}")
    if how == "exit":
        os._exit(17)
    programs.kill_itself(getattr(signal, how))


def launch(way: Way, *args: Any, **settings: Any) -> Results:
    return way.launch(fail_at_first, *args, **settings)


def failure(way: Way, *args: Any, **settings: Any) -> TrainingFailed:
    return way.failure(fail_at_first, *args, **settings)


@pytest.mark.parametrize("how", ["raise", "exit", "SIGKILL", "SIGSEGV"])
def test_failures_cause_exactly_as_many_restarts(fast: Way, how: str, capfd: pytest.CaptureFixture[str]):
    results = launch(fast, 2, how, max_restarts=2)
    assert results.values == [(0, 2), (1, 2)]
    assert [attempt.number for attempt in results.attempts] == [0, 1, 2]
    assert [attempt.world_size for attempt in results.attempts] == [2, 2, 2]
    assert all("rank 1" in (attempt.cause or "") for attempt in results.attempts[:2])
    assert results.attempts[2].cause is None and results.attempts[2].failure is None
    times = [moment for attempt in results.attempts for moment in (attempt.started, attempt.ended)]
    assert times == sorted(times)
    assert capfd.readouterr().err.count("sparkdist: starting another one") == 2


def test_after_the_last_restart_the_error_names_every_attempt(fast: Way):
    error = failure(fast, 9, max_restarts=2)
    assert [attempt.failure.message for attempt in error.attempts if attempt.failure] == [
        "attempt 0",
        "attempt 1",
        "attempt 2",
    ]
    assert error.root.message == "attempt 2" and isinstance(error.__cause__, Worse)
    assert "That was attempt 3" in str(error) and "  1: rank 1 raised" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and len(copy.attempts) == 3


def test_a_killed_agent_is_a_failure(fast: Way, tmp_path: Path):
    with running(fast, tmp_path, max_restarts=1) as run:
        os.kill(run.agent, signal.SIGKILL)
        run.go.touch()
        attempts = run.outcome.result(timeout=30).attempts
    assert [attempt.number for attempt in attempts] == [0, 1] and "agent" in (attempts[0].cause or "")


def test_a_killed_spark_worker_is_a_failure(fast_on_spark: Way, tmp_path: Path):
    """Of which no row comes: what Spark says of its job decides, on Connect in other words."""
    with running(fast_on_spark, tmp_path, max_restarts=1) as run:
        os.kill(leading_worker(), signal.SIGKILL)
        run.go.touch()
        attempts = run.outcome.result(timeout=60).attempts
    assert [attempt.failure and attempt.failure.kind for attempt in attempts] == ["lost", None]


def test_a_stall_is_a_failure(fast: Way):
    testing.fail(rank=1, attempt=0, after_steps=0, how="stop")
    results = fast.launch(programs.rank, max_restarts=1, stall_timeout=1)
    assert [attempt.failure and attempt.failure.kind for attempt in results.attempts] == ["stalled", None]


def test_without_max_restarts_there_is_one_attempt(fast: Way):
    error = failure(fast, 9)
    assert len(error.attempts) == 1


def test_torchruns_ranks_start_again_with_the_gang(torchrun: Way):
    assert launch(torchrun, 1, max_restarts=1).values == [(0, 1), (1, 1)]


def test_a_script_starts_again(fast: Way, tmp_path: Path):
    script = tmp_path / "flaky.py"
    script.write_text("import os, sys\nsys.exit(3 if os.environ['SPARKDIST_ATTEMPT'] == '0' else 0)\n")
    results = fast.launch(str(script), max_restarts=1)
    assert "exited with code 3" in (results.attempts[0].cause or "")


def test_an_elastic_gang_starts_with_the_slots_there_are(fast: Way):
    results = fast.launch(programs.rank, num_processes=4, min_processes=1, resize_wait=0)
    assert results.world_size == (4 if fast.local_mode else 2)
    assert results.values == list(range(results.world_size))


# --- which failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "how", "attempts"),
    [
        ({"restart_on": [Flaky]}, "raise", 2),  # a subtype
        ({"restart_on": [ValueError, 17]}, "raise", 1),
        ({"restart_on": [ValueError, 17]}, "exit", 2),
        ({"restart_on": [-9]}, "SIGKILL", 2),
        ({"restart_on": [9]}, "SIGKILL", 1),
        ({"no_restart_on": [Flaky]}, "raise", 1),
        ({"no_restart_on": [17]}, "exit", 1),
        ({"no_restart_on": [18, OSError]}, "exit", 2),
        ({"restart_on": [Flaky], "no_restart_on": [Worse]}, "raise", 1),
    ],
)
def test_which_failures_are_followed_by_a_restart(settings: dict[str, Any], how: str, attempts: int):
    way = Way("fast", True, Path())
    error = failure(way, 9, how, max_restarts=1, **settings)
    assert len(error.attempts) == attempts


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("max_restarts", -1, "at least 0"),
        ("max_restarts", True, "at least 0"),
        ("max_restarts", None, "at least 0"),
        ("max_preemptions", -1, "at least 0"),
        ("max_preemptions", 1.5, "at least 0"),
        ("min_processes", 0, "at least 1"),
        ("min_processes", 3, "num_processes=2"),
        ("resize_wait", -1, "at least 0"),
        ("resize_wait", None, "seconds"),
        ("grow", True, "min_processes"),
        ("grow", 1, "True or False"),
        ("restart_on", ValueError, "list of exception types"),
        ("restart_on", "ValueError", "list of exception types"),
        ("restart_on", [int], "int"),
        ("restart_on", [True], "True"),
        ("no_restart_on", None, "list of exception types"),
        ("no_restart_on", [300], "300"),
        ("stall_timeout", 0, "more than 0"),
    ],
)
def test_settings_are_checked(setting: str, value: object, named: str):
    with pytest.raises(ConfigurationError) as caught:
        Launcher("plain", num_processes=2, **{setting: value})  # type: ignore[arg-type]
    assert setting in str(caught.value) and named in str(caught.value)


# --- preemptions --------------------------------------------------------------------------------


def test_a_rank_that_is_asked_to_end_from_outside_is_no_failure_of_the_training(fast: Way):
    results = launch(fast, 1, "SIGTERM", max_preemptions=None)
    assert results.values == [(0, 1), (1, 1)]
    assert results.attempts[0].failure and results.attempts[0].failure.preempted


def test_preemptions_have_a_budget_of_their_own(fast: Way):
    error = failure(fast, 9, "SIGTERM", max_preemptions=1, max_restarts=5)
    assert len(error.attempts) == 2
    assert len(failure(fast, 9, "SIGTERM", max_preemptions=0).attempts) == 1


def test_five_preemptions_in_a_row_without_a_report_end_the_run():
    way = Way("fast", True, Path())
    assert len(failure(way, 99, "SIGTERM", max_preemptions=None).attempts) == 5


def test_a_report_makes_up_for_preemptions():
    way = Way("fast", True, Path())
    results = way.launch(report_and_end, 6, max_preemptions=None)
    assert len(results.attempts) == 7
    assert [report.attempt for report in results.metrics if report.rank == 1] == list(range(7))


def report_and_end(attempts: int) -> None:
    from sparkdist import report

    report({"attempt": attempt()})
    if attempt() < attempts:
        if programs.rank() == 0:
            programs.sleep_for_ever()
        end("SIGTERM")


# --- what ends a run at once --------------------------------------------------------------------


def test_a_timeout_is_the_whole_runs(fast: Way):
    began = time.monotonic()
    with pytest.raises(TrainingTimeout) as caught:
        fast.launch(fail_then_wait, max_restarts=5, timeout=4)
    assert time.monotonic() - began < 4 + 6
    assert [attempt.number for attempt in caught.value.attempts] == [0, 1]


def fail_then_wait() -> None:
    if attempt() == 0 and programs.rank() == 1:
        raise Flaky
    programs.sleep_for_ever()


def test_ctrl_c_is_not_followed_by_another_attempt(clean: None, tmp_path: Path):
    """In the main thread of this process, as in a notebook."""
    main = threading.get_ident()

    def interrupt() -> None:
        assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)), 60)
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            Launcher("plain", num_processes=2, local_mode=True, max_restarts=5).run(
                programs.announce_and_wait, tmp_path
            )


@pytest.mark.classic
def test_a_cancelled_job_is_not_started_again(spark: Any, on_spark: Way, tmp_path: Path):
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(on_spark.launch, programs.announce_and_wait, tmp_path, max_restarts=5)
        assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)), 60)
        spark.sparkContext.cancelAllJobs()
        with pytest.raises(TrainingFailed) as caught:
            outcome.result()
    assert len(caught.value.attempts) == 1
