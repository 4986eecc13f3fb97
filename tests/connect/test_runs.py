"""On Spark Connect a run gives the same values, errors, logs and ends as on a classic session."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sparkdist import (
    Launcher,
    PreflightError,
    TorchDistributor,
    TrainingFailed,
    TrainingTimeout,
)
from tests import support
from tests.connect.driver import rank_of_a_pair
from tests.faults import programs

pytestmark = pytest.mark.usefixtures("ranks_work_after")


def plain(num_processes: int = 2, **settings: Any) -> Launcher:
    return Launcher("plain", num_processes=num_processes, **{"timeout": 60, **settings})


def failure(program: Any, *args: Any, **settings: Any) -> TrainingFailed:
    with pytest.raises(TrainingFailed) as caught:
        plain(**settings).launch(program, *args)
    assert "JVM" not in str(caught.value)
    assert "\tat org.apache" not in str(caught.value)
    return caught.value


# --- what a run gives ---------------------------------------------------------------------------


def test_ranks_of_a_function_find_each_other_and_print_live(capfd: pytest.CaptureFixture[str]):
    results = TorchDistributor(2, timeout=60).launch(rank_of_a_pair)
    assert results.values == [(0, 2.0), (1, 2.0)]
    said = capfd.readouterr().out.splitlines()
    assert {"[rank 0] summed", "[rank 1] summed"} <= set(said)


def test_lines_come_while_ranks_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    said = ""

    def heard() -> bool:
        nonlocal said
        said += capfd.readouterr().out
        return "[rank 0] here" in said and "[rank 1] here" in said

    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(plain().launch, print_and_wait, tmp_path / "go")
        try:
            assert support.wait_until(heard, 20)
            assert not outcome.done()
        finally:
            (tmp_path / "go").touch()
        assert outcome.result(20).values == [0, 1]


def print_and_wait(go: Path) -> int:
    print("here", flush=True)
    while not go.exists():
        time.sleep(0.01)
    return programs.rank()


def test_torchrun(tmp_path: Path):
    results = TorchDistributor(2, launcher="torchrun", timeout=100).launch(rank_of_a_pair)
    assert results.values == [(0, 2.0), (1, 2.0)]


def test_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "train.py").write_text("import sys, beside; print(beside.NAME, sys.argv[1:])")
    assert plain().run(tmp_path / "train.py", "--lr", 1) is None
    assert "[rank 1] beside ['--lr', '1']" in capfd.readouterr().out.splitlines()


def test_the_active_session_is_found_in_another_thread(spark: Any):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(plain().launch, on_spark).result(60).values == [True, True]
    assert plain(spark=spark, local_mode=False).run(on_spark)


def on_spark() -> bool:
    return "SPARK_LOCAL_DIRS" in os.environ  # which Spark's workers have, and this process has not


def test_values_too_large_for_rows():
    import hashlib

    for digest, data in plain().launch(programs.random_bytes, 20 << 20).values:
        assert hashlib.sha256(data).hexdigest() == digest


def test_concurrent_runs():
    plain(1).run(programs.rank)
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(plain(1).launch, describe_run, i) for i in range(2)]
        assert [result.result(60).values for result in results] == [[(0, "0")], [(1, "0")]]


def describe_run(i: int) -> tuple[int, str]:
    return i, os.environ["RANK"]


# --- errors -------------------------------------------------------------------------------------


def test_an_exception():
    error = failure(raise_in_rank_1)
    assert isinstance(error.__cause__, ValueError)
    assert "KeyError: 'inner'" in error.root.traceback
    assert set(error.failures) == {1}
    assert "raise_chained" in error.root.traceback
    assert str(error).startswith("rank 1 raised ValueError: outer")


def raise_in_rank_1() -> None:
    if programs.rank() == 1:
        programs.raise_chained()
    programs.sleep_for_ever()


@pytest.mark.parametrize("code", [3, "a message"])
def test_an_exit_code(code: Any):
    error = failure(programs.raise_it, SystemExit, code)
    assert error.root.kind == "exit"
    assert error.root.exit_code == (code if isinstance(code, int) else 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_a_signal(number: signal.Signals):
    error = failure(programs.kill_itself, number)
    assert error.root.signal == number.name


def test_a_timeout_with_stacks():
    with pytest.raises(TrainingTimeout) as caught:
        plain(timeout=3).run(programs.sleep_for_ever)
    assert set(caught.value.stacks) == {0, 1}
    assert all("sleep_for_ever" in stack for stack in caught.value.stacks.values())


def test_a_rank_that_sleeps_beside_one_that_computes():
    error = failure(programs.one_each, programs.spin_for_ever, programs.sleep_for_ever, stall_timeout=1)
    assert (error.root.rank, error.root.kind, len(error.failures)) == (1, "stalled", 1)
    assert "in spin_for_ever" in error.stacks[0] and "in sleep_for_ever" in error.stacks[1]


def test_a_rank_that_is_stopped_before_the_function():
    with pytest.raises(TrainingTimeout) as caught:
        plain(start_timeout=3).run(programs.take, programs.StopsRank1())
    assert (caught.value.setting, caught.value.missing) == ("start_timeout", (1,))
    assert "is stopped" in caught.value.stacks[1]


def test_a_start_timeout_while_others_hold_the_slots(spark: Any):
    with held_slots(spark, 6), pytest.raises(TrainingTimeout, match="still waiting for slots"):
        plain(start_timeout=3).run(programs.rank)


def test_a_killed_spark_worker(tmp_path: Path):
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(failure, programs.announce_and_wait, tmp_path)
        assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)), 30)
        pids = [pid for pid in support.session_processes() if is_worker(pid)]
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        error = outcome.result(20)
    assert {failed.kind for failed in error.failures.values()} == {"lost"}


def is_worker(pid: int) -> bool:
    """A Spark Python worker: forked from the daemon, below which our own processes have a mark."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        parent = support.parents()[pid]
        above = Path(f"/proc/{parent}/cmdline").read_bytes()
    except (OSError, KeyError):
        return False
    mark = support.FORKSERVER_MARKER in support.start_environ(pid)
    return b"pyspark.daemon" in command and b"pyspark.daemon" in above and not mark


@pytest.mark.parametrize("megabytes", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_large_functions_and_large_files(tmp_path: Path, megabytes: int):
    data = os.urandom(1 << 20) * megabytes
    path = tmp_path / "large"
    path.write_bytes(data)

    def sizes() -> tuple[int, int]:
        import sparkdist

        return len(data), os.stat(sparkdist.context().shipped("large")).st_size

    with pytest.warns(UserWarning, match="the largest part is"):
        results = plain(ship=[path]).launch(sizes)
    assert results.values == [(len(data), len(data))] * 2


# --- slots --------------------------------------------------------------------------------------


def test_too_few_slots_are_told_within_seconds():
    plain().run(programs.rank)
    began = time.monotonic()
    with pytest.raises(PreflightError, match=r"needs 3 slots at once.*has 2 cores"):
        plain(3).run(programs.rank)
    assert time.monotonic() - began < 8


@pytest.mark.slow
def test_too_few_slots_where_confs_hide_the_cores(spark: Any):
    spark.conf.set("spark.sql.leafNodeDefaultParallelism", "8")
    try:
        with pytest.raises(PreflightError, match="needs 3 slots at once"):
            plain(3).run(programs.rank)
    finally:
        spark.conf.unset("spark.sql.leafNodeDefaultParallelism")


@pytest.mark.slow
def test_busy_slots_are_waited_for(spark: Any):
    with held_slots(spark, 9) as others:
        assert plain().launch(programs.rank).values == [0, 1]
        assert others.done()


class held_slots:
    """Another job of the session that holds both slots for some seconds."""

    def __init__(self, spark: Any, seconds: float) -> None:
        self._spark, self._seconds = spark, seconds
        self._pool = ThreadPoolExecutor(1)
        self._started = threading.Event()

    def __enter__(self) -> Any:
        self._spark.registerProgressHandler(self._note)
        outcome = self._pool.submit(self._hold)
        assert self._started.wait(30)
        return outcome

    def __exit__(self, *exc: object) -> None:
        self._spark.removeProgressHandler(self._note)
        self._pool.shutdown()

    def _note(self, stages: Any, inflight_tasks: int, **_: Any) -> None:
        if inflight_tasks == 2:
            self._started.set()

    def _hold(self) -> None:
        seconds = self._seconds

        def sleep(batches):
            for batch in batches:
                time.sleep(seconds)
                yield batch

        numbers = self._spark.range(0, 2, 1, 2)
        numbers.mapInArrow(sleep, numbers.schema).collect()


# --- what is left as it was ---------------------------------------------------------------------


def states_of_workers(spark: Any) -> dict[int, Any]:
    def state(batches):
        import pyarrow

        for _ in batches:
            pass
        handlers = {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()}
        found = (os.getpid(), sorted(os.environ.items()), os.getcwd(), handlers, hash(random.getstate()))
        yield pyarrow.RecordBatch.from_pydict({"pid": [found[0]], "state": [repr(found)]})

    rows = spark.range(0, 2, 1, 2).mapInArrow(state, "pid long, state string", barrier=True).collect()
    return {row.pid: row.state for row in rows}


def test_workers_are_used_again_and_left_as_they_were(spark: Any):
    before = states_of_workers(spark)
    for _ in range(3):
        TorchDistributor(2, timeout=60).run(rank_of_a_pair)
    with pytest.raises(TrainingFailed):
        plain().run(programs.raise_it, ValueError, "no")
    assert states_of_workers(spark) == before


def test_the_callers_tags_are_kept_and_his_cancel_ends_the_run(spark: Any, tmp_path: Path):
    spark.addTag("mine")
    try:
        with ThreadPoolExecutor(1) as pool:

            def interrupt() -> list[str]:
                assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)), 30)
                return spark.interruptTag("mine")

            interrupted = pool.submit(interrupt)
            error = failure(programs.announce_and_wait, tmp_path)
            assert len(interrupted.result(5)) == 1
        assert spark.getTags() == {"mine"}
    finally:
        spark.clearTags()
    assert {failed.kind for failed in error.failures.values()} == {"lost"}
