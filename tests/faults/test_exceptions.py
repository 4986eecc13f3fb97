"""A rank raises: the error names it, shows its traceback, and is caused by its exception."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest

from tests.faults import programs
from tests.faults.ways import Way


def test_a_function_raises(way: Way):
    error = way.failure_of_rank_1(programs.raise_it, ValueError, "boom", 7)
    failure = error.failures[1]
    assert (failure.kind, failure.type_name, failure.message) == ("exception", "ValueError", "('boom', 7)")
    assert type(failure.exception) is ValueError and failure.exception.args == ("boom", 7)
    assert error.__cause__ is failure.exception
    assert "in raise_it" in failure.traceback and "raise kind(*args)" in failure.traceback
    assert failure.traceback.count('programs.py", line') == 2  # the user's own frames,
    assert failure.traceback.count('  File "') == 2  # and no others
    assert "rank 1 raised ValueError: ('boom', 7)" in str(error)
    assert failure.traceback.rstrip() in str(error)


@pytest.mark.parametrize(
    "doing", [programs.compute, programs.compute_in_c, programs.be_deaf], ids=lambda doing: doing.__name__
)
def test_a_function_raises_while_the_others(fast: Way, doing):
    error = fast.failure_beside(partial(programs.beside, doing), programs.raise_it, ValueError, "boom")
    assert (error.root.kind, error.root.message) == ("exception", "boom")
    assert set(error.failures) == {1}


def test_a_function_raises_beside_a_collective_under_torchrun(torchrun: Way):
    error = torchrun.failure_beside(programs.beside_a_collective, programs.raise_it, ValueError, "boom")
    assert error.root.message == "boom"


def test_a_script_raises(lean: Way, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\n")
    error = lean.failure(script)
    failure = error.root
    assert (failure.rank, failure.kind, failure.type_name) == (1, "exception", "ValueError")
    assert isinstance(error.__cause__, ValueError) and error.__cause__.args == ("boom",)
    assert 'train.py", line 3, in <module>' in failure.traceback
    # As under python, it is on stderr as well.
    assert "ValueError: boom" in failure.log_tail


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (programs.Strict, (3, "wrong"), "wrong (3)"),
        (programs.Forgetful, ("something",), "something"),
        (programs.Disguised, ("seen",), "seen"),
        (programs.holding_a_lock, ("locked",), "locked"),
        (programs.Mute, (), "<no text: __str__ of tests.faults.programs.Mute raised RuntimeError>"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_exception_that_does_not_travel_brings_its_text(fast: Way, kind, arguments, text):
    error = fast.failure_of_rank_1(programs.raise_it, kind, *arguments)
    assert error.root.exception is None and error.__cause__ is None
    assert text in error.root.message and text in str(error)
    assert "in raise_it" in error.root.traceback
    assert error.root.type_name.rpartition(".")[2] in ("ValueError", kind.__name__)


def test_an_exception_of_a_users_class(fast: Way):
    error = fast.failure_of_rank_1(programs.raise_it, programs.Custom, "mine")
    assert type(error.__cause__) is programs.Custom and error.__cause__.args == ("mine",)
    assert error.root.type_name == "tests.faults.programs.Custom"


def test_an_exception_of_a_class_that_went_with_the_function(fast: Way):
    class Inner(Exception): ...

    def function() -> None:
        raise Inner("local")

    error = fast.failure(function)
    assert type(error.__cause__) is Inner and str(error.__cause__) == "local"


def test_a_chained_exception_shows_its_cause(lean: Way):
    error = lean.failure_of_rank_1(programs.raise_chained)
    assert "KeyError: 'inner'" in error.root.traceback
    assert "direct cause of the following exception" in error.root.traceback
    assert error.root.traceback.rstrip().endswith("ValueError: outer")


@pytest.mark.parametrize("fast", ["fast-local"], indirect=True)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, MemoryError, RecursionError])
def test_any_exception_is_the_ranks_own(fast: Way, kind):
    error = fast.failure_of_rank_1(programs.raise_it, kind, "from a rank")
    assert error.root.type_name == kind.__name__ and type(error.__cause__) is kind


def test_a_text_of_any_size(fast: Way):
    error = fast.failure_of_rank_1(programs.raise_it_large, 20 << 20)
    assert error.root.type_name == "ValueError"
    assert error.root.message.startswith("xxxx")


def test_a_failure_before_the_function_is_entered(lean: Way):
    error = lean.failure(programs.take, programs.Unpickled(programs.fail_on_a_rank))
    assert error.root.kind == "exception" and error.root.message == "not here"
    assert "in fail_on_a_rank" in error.root.traceback


def test_an_error_pickles_with_all_that_it_says(fast: Way):
    error = fast.failure_of_rank_1(programs.raise_it, programs.Custom, "mine")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.run_id == error.run_id
    assert copy.failures[1].traceback == error.failures[1].traceback and copy.root.rank == 1
