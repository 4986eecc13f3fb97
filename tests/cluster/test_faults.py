"""Faults of ranks on executors of their own: the real error comes promptly, and the next run works."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from sparkdist import ResultError, TrainingFailed, TrainingTimeout
from tests import support
from tests.cluster.clusters import Cluster
from tests.faults import programs
from tests.faults.ways import PROMPT, Way


def test_an_exception(either: Way):
    error = either.failure_of_rank_1(programs.raise_it, programs.Custom, "boom", 7)
    assert (error.root.kind, error.root.type_name) == ("exception", "tests.faults.programs.Custom")
    assert isinstance(error.__cause__, programs.Custom) and error.__cause__.args == ("boom", 7)
    assert "in raise_it" in error.root.traceback


def test_the_last_rank_of_the_last_node_fails(way: Way, cluster: Cluster):
    error = way.failure(fail_in_rank, cluster.slots - 1, way.moment)
    assert time.time() - os.stat(way.moment).st_mtime < PROMPT
    assert error.root.rank == cluster.slots - 1
    assert error.root.log_tail[-1] == "last words"


def fail_beside_sleepers(rank: int) -> None:
    if programs.rank() != rank:
        programs.sleep_for_ever()
    print("last words")
    raise LookupError("the last rank")


def fail_in_rank(rank: int, moment: str | Path) -> None:
    """The ranks of all nodes wait for one, which fails."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if programs.rank() == rank:
        print("last words")
        Path(moment).touch()
        raise LookupError("the last rank")
    dist.barrier()


@pytest.mark.parametrize(("code", "exit_code"), [(SystemExit(3), 3), (SystemExit(0), 0)], ids=["3", "0"])
def test_an_exit(way: Way, code: SystemExit, exit_code: int):
    error = way.failure_of_rank_1(programs.raise_it, type(code), code.code)
    assert (error.root.kind, error.root.exit_code) == ("exit", exit_code)


@pytest.mark.slow
def test_an_exit_at_once(way: Way):
    error = way.failure_of_rank_1(os._exit, 5)
    assert (error.root.kind, error.root.exit_code) == ("exit", 5)


@pytest.mark.slow
def test_a_script_fails(way: Way, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no data')\ntime.sleep(3600)\n"
    )
    error = way.failure(script)
    assert (error.root.rank, error.root.exit_code, error.root.message) == (1, 1, "no data")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT"])
def test_a_rank_is_killed(way: Way, name: str):
    error = way.failure_of_rank_1(programs.kill_itself, signal.Signals[name])
    assert (error.root.kind, error.root.signal) == ("signal", name)
    assert f"rank 1 was killed by {name}" in str(error)


@pytest.mark.slow
def test_a_rank_is_killed_under_torchrun(either: Way):
    error = either.failure_beside(programs.beside_a_collective, programs.kill_itself, signal.SIGKILL)
    assert (error.root.kind, error.root.signal) == ("signal", "SIGKILL")


def test_every_rank_ignores_sigterm_and_one_fails(way: Way, moments: Path):
    began = time.monotonic()
    error = way.failure(fail_beside_the_deaf, moments)
    assert error.root.message == "enough"
    # What ignores SIGTERM is killed after a period of grace.
    assert time.monotonic() - began < 2 * PROMPT
    pids = {int((moments / name).read_text()) for name in os.listdir(moments)}
    assert len(pids) == way.ranks
    assert support.wait_until(lambda: not pids & support.parents().keys(), 1)


def fail_beside_the_deaf(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    programs.announce(folder)
    if programs.rank() == 1:
        while len([name for name in os.listdir(folder) if name.isdigit()]) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        raise ValueError("enough")
    programs.sleep_for_ever()


# --- time limits --------------------------------------------------------------------------------


def test_a_timeout_shows_the_stacks_of_all_nodes(way: Way):
    began = time.monotonic()
    with pytest.raises(TrainingTimeout) as caught:
        way.launch(programs.one_each, programs.spin_for_ever, programs.sleep_for_ever, timeout=3)
    assert 3 <= time.monotonic() - began < 3 + PROMPT
    error = caught.value
    assert (error.setting, error.missing) == ("timeout", ())
    assert error.stacks.keys() == set(range(way.ranks))
    assert "in spin_for_ever" in error.stacks[0]
    assert all("in sleep_for_ever" in error.stacks[rank] for rank in range(1, way.ranks))


def test_a_rank_that_does_not_enter_the_function(way: Way):
    with pytest.raises(TrainingTimeout) as caught:
        way.launch(programs.take, programs.Unpickled(programs.block_rank_1), start_timeout=3)
    assert (caught.value.setting, caught.value.missing) == ("start_timeout", (1,))
    assert "in block_rank_1" in caught.value.stacks[1]


def test_a_stopped_rank_beside_a_collective(way: Way):
    error = way.failure(programs.beside_a_collective, way.moment, programs.stop_itself, stall_timeout=1)
    assert time.time() - os.stat(way.moment).st_mtime < 1 + PROMPT
    assert error.failures.keys() == {1}
    assert error.root.kind == "stalled"
    assert "is stopped" in error.root.message
    assert error.stacks.keys() == set(range(way.ranks))
    assert "in barrier" in error.stacks[0]


# --- results ------------------------------------------------------------------------------------


def test_a_large_value_from_the_last_node(way: Way, cluster: Cluster):
    digest, data = way.launch(random_bytes_of_rank, cluster.slots - 1, 40 << 20).values[-1]
    assert len(data) == 40 << 20
    assert hashlib.sha256(data).hexdigest() == digest


def random_bytes_of_rank(rank: int, size: int) -> object:
    return programs.random_bytes(size) if programs.rank() == rank else None


@pytest.mark.slow
def test_a_large_exception_from_the_last_node(way: Way, cluster: Cluster):
    with pytest.raises(TrainingFailed) as caught:
        way.launch(raise_large_in_rank, cluster.slots - 1)
    assert caught.value.root.rank == cluster.slots - 1
    assert len(caught.value.__cause__.args[0]) == 20 << 20  # type: ignore[union-attr]


def raise_large_in_rank(rank: int) -> None:
    if programs.rank() == rank:
        programs.raise_it_large(20 << 20)
    programs.sleep_for_ever()


def test_a_value_that_does_not_pickle(way: Way):
    with pytest.raises(ResultError) as caught:
        way.launch(programs.value_of_rank_1, threading.Lock)
    assert (caught.value.rank, caught.value.type_name) == (1, "_thread.lock")
