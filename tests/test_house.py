"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sparkdist"
SOURCES = sorted(PACKAGE.rglob("*.py"))

FRAMEWORKS = ("torch", "tensorflow", "keras", "horovod", "deepspeed", "jax", "lightning", "mlflow", "ray")
FRAMEWORK = re.compile(rf"(?i)(?<![a-z])(?:{'|'.join(FRAMEWORKS)})(?:run|elastic)?(?![a-z])")
HOMES = {"frameworks", "distributors", "data", "checkpoint", "ml", "horovod", "hvd", "keras", "cli"}

# Where else a framework is named, in code that is no docstring or comment, and why.
EXEMPT = {
    ("__init__.py", "TorchDistributor"): "the public name",
    ("__init__.py", "distributors.torch"): "and its home",
    ("__init__.py", "sparkdist.distributors.torch"): "and its home",
    ("__init__.py", "distributors.horovod_runner"): "the home of another",
    ("__init__.py", "sparkdist.distributors.horovod_runner"): "the same",
    ("settings.py", "HOROVOD_*"): "variables that are forwarded",
    ("settings.py", "KERAS_*"): "variables that are forwarded",
    ("settings.py", "TORCH_*"): "variables that are forwarded",
    ("settings.py", "PYTORCH_*"): "variables that are forwarded",
    ("settings.py", "torchrun_args"): "a setting, and settings are defined once",
    ("settings.py", "torchrun"): "a choice for a setting",
    ("settings.py", 'torchrun_args needs launcher="torchrun"'): "its check",
    ("launcher.py", "torch"): "the default framework",
    ("launcher.py", "torchrun_args"): "a setting that is passed on",
    ("launcher.py", "pytorch.spark.distributor.ignoreSsl"): "a conf of Spark's",
    ("executor/process.py", "torch_shm_manager"): "a helper process that has to be ended last",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def docstrings(tree: ast.Module) -> set[ast.expr]:
    """The nodes of all docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            found.add(first.value)
    return found


def texts(tree: ast.Module) -> Iterator[str]:
    """All names and strings of a module, but for docstrings."""
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and node not in skipped:
            yield node.value if isinstance(node.value, str) else node.value.decode()
            continue
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            text = getattr(node, field, None)
            if isinstance(text, str):
                yield text


def imports(tree: ast.Module) -> set[str]:
    """The modules that a module imports, lazily or not."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module or "")
    return found


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_are_short(path):
    assert len(path.read_text().splitlines()) <= 300
    tree = tree_of(path)
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = [part for part in node.body if getattr(part, "value", None) not in skipped]
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= 50, f"{node.name} has {length} lines"


ON_EXECUTORS = [p for p in SOURCES if p.parent.name in ("executor", "frameworks")]


@pytest.mark.parametrize("path", ON_EXECUTORS, ids=name_of)
def test_executors_need_only_the_standard_library_and_the_chosen_framework(path):
    others = tops(imports(tree_of(path))) - sys.stdlib_module_names - {"sparkdist"}
    if name_of(path) == "executor/task.py":
        others -= {"pyspark"}
    elif path.parent.name == "frameworks":
        # Its own; torchrun is torch's, and horovod_store Horovod's.
        others -= {path.stem.removesuffix("run").partition("_")[0]}
    assert others == set()


@pytest.mark.parametrize("path", ON_EXECUTORS, ids=name_of)
def test_no_module_of_executors_imports_the_drivers(path):
    allowed = (
        "executor",
        "frameworks",
        "wire",
        "settings",
        "results",
        "errors",
        "rank_context",
        "testing",
        "values",
    )
    ours = {name for name in imports(tree_of(path)) if name.startswith("sparkdist.")}
    assert {name.split(".")[1] for name in ours} <= set(allowed)


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name == "frameworks"], ids=name_of)
def test_frameworks_are_imported_lazily(path):
    # The driver makes plug-ins, too, and never loads a framework.
    tree = tree_of(path)
    at_top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    assert tops(imports(at_top)) - sys.stdlib_module_names == {"sparkdist"} & tops(imports(tree))


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if not HOMES & {*p.relative_to(PACKAGE).parts}], ids=name_of
)
def test_the_engine_names_no_framework(path):
    named = {text for text in texts(tree_of(path)) if FRAMEWORK.search(text.replace("_", " "))}
    assert {text for text in named if (name_of(path), text) not in EXEMPT} == set()


def test_every_exemption_is_needed():
    needed = {(name_of(path), text) for path in SOURCES for text in texts(tree_of(path))}
    assert EXEMPT.keys() - needed == set()


def test_the_rule_for_names_sees_what_it_should():
    def found(code):
        return [text for text in texts(ast.parse(code)) if FRAMEWORK.search(text.replace("_", " "))]

    assert found("import torch.nn") == ["torch.nn"]
    assert found("x = 'use torchrun'; torch_env = b'TORCHELASTIC_RUN_ID'") != []
    assert len(found("def f(keras=1): return tf.tensorflow, f'{x} Horovod'")) == 3
    assert found("'''torch'''\narray = stray = 'gray rays'  # torch") == []


def test_every_test_that_the_docs_name_exists():
    named = re.findall(
        r"`(tests/[\w/]+\.py)(?:::(\w+))?`", "".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))
    )
    assert len(named) > 40
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), file
        functions = [node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
        assert not test or test in functions, f"{file}::{test}"
