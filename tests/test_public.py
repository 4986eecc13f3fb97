"""What the package offers at its top, and what importing it costs."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sparkdist
from sparkdist import (
    ConfigurationError,
    Failure,
    Launcher,
    PreflightError,
    ResultError,
    Settings,
    SparkdistError,
    TorchDistributor,
    TrainingFailed,
    TrainingTimeout,
)

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "pyspark", "numpy", "pandas", "pyarrow", "lightning")


def python(code: str) -> str:
    """Runs code in a new interpreter that finds the package; returns what it prints."""
    command = [sys.executable, "-c", f"import sys; sys.path[0] = {str(ROOT)!r}\n{code}"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def submodules() -> list[str]:
    return [info.name for info in pkgutil.walk_packages(sparkdist.__path__, "sparkdist.")]


def test_all_names_what_can_be_imported():
    code = "from sparkdist import *; print(sorted(n for n in dir() if n[0] != '_' and n != 'sys'))"
    assert python(code) == str(sorted(sparkdist.__all__))
    assert set(sparkdist.__all__) <= set(dir(sparkdist))
    # What is not public: our own modules.
    public = {name for name in dir(sparkdist) if not name.startswith("_")} - set(sparkdist.__all__)
    modules = {name.split(".")[1] for name in submodules()}
    assert public - modules <= {"annotations", "TYPE_CHECKING", "import_module"}


def test_type_checkers_see_the_same_names():
    # The block for them is written by hand beside the lazy one.
    tree = ast.parse(Path(sparkdist.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {
        alias.name: node.module
        for node in imports
        if node.module and node.module.startswith("sparkdist.")
        for alias in node.names
    }
    assert homes.keys() == set(sparkdist.__all__)
    for name, home in homes.items():
        assert getattr(sparkdist, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'sparkdist' has no attribute 'nothing'"):
        _ = sparkdist.nothing


def test_no_submodule_hides_a_public_name():
    before = {name: getattr(sparkdist, name) for name in sparkdist.__all__}
    names = submodules()
    assert "sparkdist.executor.task" in names and len(names) > 30
    for name in names:
        if name != "sparkdist.executor.shim":  # a program
            importlib.import_module(name)
    assert {name: getattr(sparkdist, name) for name in sparkdist.__all__} == before
    assert all(callable(value) for value in before.values())
    code = (
        "import importlib, sparkdist\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print([name for name in sparkdist.__all__ if not callable(getattr(sparkdist, name))])"
    )
    assert python(code) == "[]"


@pytest.mark.parametrize("name", sparkdist.__all__)
def test_public_names_say_what_they_are(name):
    thing = getattr(sparkdist, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_import_is_fast():
    def seconds() -> float:
        began = time.perf_counter()
        python("import sparkdist")
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    "statement",
    [
        "pass",
        *(f"sparkdist.{name}" for name in sparkdist.__all__),
        "sparkdist.Launcher(num_processes=2, launcher='torchrun')",
        "sparkdist.TorchDistributor(2)",
    ],
)
def test_nothing_heavy_is_loaded(statement):
    code = f"import sparkdist\n{statement}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    assert python(code) == "[]"


# --- errors -------------------------------------------------------------------------------------

FAILURE = Failure(rank=3, kind="exception", type_name="ValueError", message="boom", traceback="Traceback")
ERRORS = [
    (ConfigurationError("x must be"), ValueError),
    (PreflightError("too few"), RuntimeError),
    (TrainingFailed({3: FAILURE}, "abc"), RuntimeError),
    (TrainingTimeout("timeout", 3.0, {0: "a stack"}, (1,), "training"), TimeoutError),
    (ResultError(2, "Net", "does not pickle"), RuntimeError),
]


@pytest.mark.parametrize(("error", "builtin"), ERRORS, ids=lambda part: type(part).__name__)
def test_errors_derive_as_the_tree_says_and_pickle(error, builtin):
    assert isinstance(error, SparkdistError) and isinstance(error, builtin)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_the_tree_that_is_drawn_is_the_tree_there_is():
    drawn = inspect.getdoc(sys.modules["sparkdist.errors"]) or ""
    for error, builtin in ERRORS:
        assert f"── {type(error).__name__} ({builtin.__name__})" in drawn
    assert {type(error) for error, _ in ERRORS} <= set(SparkdistError.__subclasses__())


def test_a_failed_training_is_caused_by_its_root_and_leads_with_it():
    cause = ValueError("boom")
    first = Failure(
        rank=1, kind="exception", order=0, type_name="ValueError", message="boom", exception=cause
    )
    later = Failure(rank=0, kind="signal", order=1, signal="SIGKILL", hint="out of memory")
    error = TrainingFailed({0: later, 1: first}, "abc")
    assert error.root is first and error.__cause__ is cause
    assert str(error).startswith("rank 1 raised ValueError: boom (run abc)")
    assert "rank 0" in str(error)
    # The exception is the user's: it need not survive another trip.
    assert pickle.loads(pickle.dumps(error)).root == dataclasses.replace(first, exception=None)


# --- settings -----------------------------------------------------------------------------------


def test_settings_are_frozen_and_hide_values_of_variables():
    settings = Settings(env={"API_TOKEN": "hush"}, timeout=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.timeout = 4  # type: ignore[misc]
    assert "hush" not in repr(settings) and "timeout=3.0" in repr(settings)
    for wrong in ({"API_TOKEN": 7}, {"API_TOKEN": "hush\0"}):
        with pytest.raises(ConfigurationError, match="API_TOKEN") as caught:
            Settings(env=wrong)  # type: ignore[arg-type]
        assert "hush" not in str(caught.value)


def test_later_changes_of_what_was_passed_do_not_reach_settings():
    env = {"A": "1"}
    settings = Settings(env=env)
    env["A"] = "2"
    assert settings.env == {"A": "1"}


def test_every_setting_is_documented_and_typed_for_the_front_doors():
    names = [field.name for field in dataclasses.fields(Settings)]
    from sparkdist.settings import SettingsArgs

    assert names == list(SettingsArgs.__annotations__)
    for name in names:
        assert f"\n    {name}: " in (inspect.getdoc(Settings) or "")


NAN, INFINITY = float("nan"), float("inf")
WRONG = [
    *({"num_processes": value} for value in (0, -1, True, 1.5, "2", None)),
    *({name: value} for name in ("timeout", "start_timeout") for value in (NAN, INFINITY, -1, 0, True, "3")),
    *({"start_timeout": None}, {"idle_timeout": -1}),
    *({name: value} for name in ("local_mode", "use_gpu") for value in (1, 0, "yes")),
    *({"nothing": 1}, {"logs": "some"}, {"launcher": "slurm"}, {"logs": []}),
    *({"env": ["A=1"]}, {"env": {"": "1"}}, {"env": {"A=B": "1"}}, {"env": {1: "1"}}),
    *({"env": {"RANK": "1"}}, {"env": {"MASTER_PORT": "1"}}, {"env": {"TORCHELASTIC_RUN_ID": "mine"}}),
    *({"forward_env": "NCCL_*"}, {"forward_env": [1]}, {"ship": "folder"}, {"ship": ["/no/such/file"]}),
    *({"torchrun_args": ["--max-restarts=2"]}, {"launcher": "torchrun", "torchrun_args": "--max-restarts=2"}),
    *({"launcher": "torchrun", "torchrun_args": [arg]} for arg in ("--nnodes=2", "--master_port=1", "-m")),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("front_door", [Launcher, TorchDistributor])
def test_wrong_settings_are_refused_when_made(front_door, wrong):
    with pytest.raises(ConfigurationError):
        front_door(**wrong)


def test_an_unknown_framework_is_refused():
    with pytest.raises(ConfigurationError, match="'caffe'"):
        Launcher("caffe")
    with pytest.raises(ConfigurationError, match="'plain' has no launcher 'torchrun'"):
        Launcher("plain", launcher="torchrun")


def test_two_shipped_things_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data").touch()
    with pytest.raises(ConfigurationError, match="'data'"):
        Settings(ship=[tmp_path / "a/data", tmp_path / "b/data"])  # type: ignore[arg-type]


def test_wrong_entries_are_refused_before_anything_starts(tmp_path):
    distributor = TorchDistributor(1, True)
    (tmp_path / "train.py").touch()
    for entry in (str(tmp_path / "missing.py"), tmp_path / "missing.py", tmp_path, 7, None):
        with pytest.raises(ConfigurationError):
            distributor.run(entry)
    with pytest.raises(ValueError, match="lr"):
        distributor.run(tmp_path / "train.py", lr=1)
    with pytest.raises(TypeError):
        distributor.run()
