"""A rank is killed: the error names it and the signal, and no peer that noticed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.faults import programs
from tests.faults.ways import Way

DEATHS: dict[str, tuple[Any, ...]] = {
    "SIGKILL": (programs.kill_itself, signal.SIGKILL),
    "SIGTERM": (programs.kill_itself, signal.SIGTERM),
    "SIGSEGV": (programs.segfault,),
    "SIGABRT": (os.abort,),
}


def check(error, name: str) -> None:
    assert (error.root.kind, error.root.signal) == ("signal", name)
    assert error.root.hint == ""  # nothing here ran out of memory
    assert f"rank 1 was killed by {name}" in str(error)


@pytest.mark.parametrize("name", DEATHS)
def test_a_rank_is_killed(lean: Way, name: str):
    check(lean.failure_of_rank_1(*DEATHS[name]), name)


def test_a_rank_is_killed_beside_a_collective_under_torchrun(torchrun: Way):
    check(torchrun.failure_beside(programs.beside_a_collective, *DEATHS["SIGKILL"]), "SIGKILL")


def test_the_root_is_the_killed_rank_each_time(fast: Way):
    # Its peer sees the connection end within a moment of it.
    for _ in range(10):
        check(fast.failure_of_rank_1(*DEATHS["SIGKILL"]), "SIGKILL")


def test_a_script_is_killed(lean: Way, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(3600)\n"
    )
    error = lean.failure(script)
    assert error.root.rank == 1
    check(error, "SIGKILL")


def test_the_last_lines_of_a_killed_rank_are_shown(fast: Way):
    error = fast.failure_of_rank_1(programs.say_and_die, "about to read batch 17")
    assert error.root.log_tail[-1] == "about to read batch 17"
    assert "about to read batch 17" in str(error)
