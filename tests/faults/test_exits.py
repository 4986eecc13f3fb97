"""A rank ends by itself: a function must return, a script must exit with 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.faults import programs
from tests.faults.ways import Way


@pytest.mark.parametrize(
    ("end", "argument", "code", "message"),
    [
        (sys.exit, 0, 0, ""),
        (sys.exit, None, 0, ""),
        (sys.exit, 3, 3, ""),
        (sys.exit, "out of data", 1, "out of data"),
        (os._exit, 0, 0, ""),
        (os._exit, 7, 7, ""),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_function_exits(lean: Way, end, argument, code, message):
    # A peer in a collective might fail by itself before it is stopped; a sleeper does not.
    error = lean.failure_beside(programs.beside_a_sleeper, end, argument)
    failure = error.root
    assert (failure.kind, failure.exit_code, failure.message) == ("exit", code, message)
    assert f"rank 1 exited with code {code} instead of returning" in str(error)
    assert message in str(error)
    assert set(error.failures) == {1}


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('out of data')", 1, "out of data"),
        ("os._exit(7)", 7, ""),
    ],
)
def test_a_script_exits_with_an_error(lean: Way, tmp_path: Path, ending, code, message):
    text = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ending}\ntime.sleep(3600)\n"
    error = lean.failure(script(tmp_path, text))
    failure = error.root
    assert (failure.rank, failure.kind, failure.exit_code) == (1, "exit", code)
    assert failure.message == message and f"rank 1 exited with code {code}" in str(error)
    assert message in str(error)
    assert set(error.failures) == {1}


def test_a_script_exits_with_success(way: Way, tmp_path: Path):
    text = "import os, sys\nif os.environ['RANK'] == '1':\n    {}\nos._exit(0)\n"
    for ending in ("sys.exit(0)", "sys.exit()", "exec('')  # to its end"):
        assert way.launch(script(tmp_path, text.format(ending))).values == [None, None]


def test_a_linked_script_imports_from_the_folder_of_what_it_leads_to(lean: Way, tmp_path: Path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "helper.py").write_text("answer = 42")
    (real / "train.py").write_text("import helper; assert helper.answer == 42")
    link = tmp_path / "train.py"
    link.symlink_to(real / "train.py")
    assert lean.launch(link).values == [None, None]


@pytest.mark.parametrize("threads", ["4,2", "", "0", "many"])
def test_any_omp_num_threads_that_openmp_takes(fast: Way, threads: str):
    assert fast.launch(programs.rank, env={"OMP_NUM_THREADS": threads}).values == [0, 1]


def test_a_rank_that_fails_before_the_function_says_why(fast: Way, tmp_path: Path):
    error = fast.failure(programs.rank, env={"TZ": "UTC", "OMP_NUM_THREADS": "1" * 30})
    assert error.root.kind == "exit"
    assert any("Traceback" in line for line in error.root.log_tail)
