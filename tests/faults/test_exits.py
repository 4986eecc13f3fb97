"""A rank ends by itself: a function must return, a script must exit with 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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
    error = lean.failure_of_rank_1(end, argument)
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
