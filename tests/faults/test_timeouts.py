"""A limit passes: the error shows where every living rank stands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sparkdist import TrainingTimeout
from tests import support
from tests.faults import programs
from tests.faults.ways import Way


def timeout_of(way: Way, program: Any, *args: Any, **limit: Any) -> TrainingTimeout:
    ((setting, seconds),) = limit.items()
    began = time.monotonic()
    with pytest.raises(TrainingTimeout) as caught:
        way.launch(program, *args, **limit)
    assert seconds <= time.monotonic() - began < seconds + 8
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert (error.setting, error.seconds) == (setting, seconds)
    assert f"{seconds:g} s" in str(error) and f"Raise {setting}=" in str(error)
    return error


def limit(way: Way) -> float:
    """Time enough to be in the function: the forkserver is warm, torchrun's interpreters are not."""
    return 2 if way.launcher == "fast" else 5


def test_ranks_that_run_and_sleep(way: Way):
    way.launch(programs.rank)  # warm
    error = timeout_of(
        way, programs.one_each, programs.spin_for_ever, programs.sleep_for_ever, timeout=limit(way)
    )
    assert error.stacks.keys() == {0, 1}
    assert "in spin_for_ever" in error.stacks[0] and "in one_each" in error.stacks[0]
    assert "in sleep_for_ever" in error.stacks[1]
    assert error.missing == ()
    for rank in (0, 1):
        assert f"--- rank {rank}:\n{error.stacks[rank].rstrip()}" in str(error)


def test_ranks_that_cannot_run_python(fast: Way):
    fast.launch(programs.rank)
    error = timeout_of(fast, programs.one_each, programs.spin_in_c, programs.stop_itself, timeout=2)
    assert "in spin_in_c" in error.stacks[0]
    assert "is stopped" in error.stacks[1]


def test_all_threads_are_shown_and_no_rank_that_has_ended(fast: Way):
    fast.launch(programs.rank)
    error = timeout_of(fast, programs.one_each, programs.spin_beside_a_thread, programs.rank, timeout=2)
    assert error.stacks.keys() == {0}
    assert "in spin_for_ever" in error.stacks[0] and "in sleep_for_ever" in error.stacks[0]


def test_a_rank_that_does_not_enter_the_function(lean: Way):
    lean.launch(programs.rank)
    error = timeout_of(
        lean, programs.take, programs.Unpickled(programs.block_rank_1), start_timeout=limit(lean)
    )
    assert error.missing == (1,)
    assert "rank 1 had not entered the function" in str(error)
    assert "in block_rank_1" in error.stacks[1]


@pytest.mark.slow
def test_ranks_that_ignore_sigterm_under_torchrun(torchrun: Way):
    torchrun.launch(programs.rank)
    error = timeout_of(torchrun, programs.ignore_sigterm, timeout=limit(torchrun))
    assert error.stacks.keys() == {0, 1}


SLOW_IMPORT = """
import sys, time
from sparkdist import TrainingTimeout, Launcher
from sparkdist.frameworks.plain import Plain

def rank(): return 0

Plain.preload = ("imports_for_ever",)  # before the first server is started, and so in its key
try:
    Launcher("plain", local_mode=True, start_timeout=2).run(rank)
except TrainingTimeout as error:
    print(error.setting, error.missing, error.phase)
"""


def test_an_import_that_never_ends(tmp_path: Path, clean: None):
    (tmp_path / "imports_for_ever.py").write_text("import threading; threading.Event().wait()")
    environ = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-W", "error", "-c", SLOW_IMPORT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "start_timeout (0,) still importing the framework", done.stderr
    # The server cannot watch its driver while it imports, and yet ends with it.
    assert support.wait_until(lambda: not importing(tmp_path), 5)


def importing(folder: Path) -> list[int]:
    marker = f"{os.pathsep}{folder}".encode()
    return [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/environ") if marker in environ_of(p)]


def environ_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has ended
