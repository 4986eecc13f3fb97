"""Our edits of Horovod's released source, on that source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from sparkdist.horovod.build import patches, source
from sparkdist.horovod.build.diagnosis import BuildError
from tests.horovod.conftest import CACHE

PARTS = ("setup.py", "CMakeLists.txt", "horovod", "cmake", "third_party/gloo")


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    """The source as it was released, from the cache or pip."""
    folder = tmp_path_factory.mktemp("source")
    archive = source.download("0.28.1", CACHE / "source", folder / "log", os.environ)
    return source.unpack(archive, folder)


@pytest.fixture
def tree(released, tmp_path):
    """A copy of the parts that count."""
    for part in PARTS:
        copy = shutil.copytree if (released / part).is_dir() else shutil.copy
        (tmp_path / part).parent.mkdir(exist_ok=True)
        copy(released / part, tmp_path / part)
    return tmp_path


def test_every_edit_is_needed_once_and_recognised_afterwards(tree):
    assert patches.apply_edits(tree) == list(patches.EDITS)
    edited = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    assert patches.apply_edits(tree) == []
    assert edited == {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_the_edited_source_says_what_it_should(tree):
    patches.apply_edits(tree)
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        text = (tree / name).read_text()
        assert "CMAKE_CXX_STANDARD 17" in text and "CMAKE_CXX_STANDARD 14" not in text
    for path in ("setup.py", "horovod/runner/js_run.py"):
        compile((tree / path).read_text(), path, "exec")
    # The function that asked for distutils still does its work.
    done = subprocess.run(
        [sys.executable, "-c", "from horovod.runner.js_run import find_executable as f; print(f('sh'))"],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == shutil.which("sh"), done.stderr


@pytest.mark.parametrize("edit", patches.EDITS, ids=lambda edit: f"{edit.file}-{edit.why}".replace(" ", "-"))
def test_an_edit_that_does_not_fit_is_an_error_that_names_file_and_pattern(edit, tree):
    path = tree / edit.file
    text = path.read_text()
    # Neither what the edit replaces, nor what it puts there.
    path.write_text(re.sub(edit.pattern, "cffi>=2", text))
    with pytest.raises(BuildError, match=re.escape(edit.file)) as caught:
        edit.apply(tree)
    assert repr(edit.pattern) in str(caught.value)
    # It is there more often than we know of.
    found = re.search(edit.pattern, text)
    assert found
    path.write_text(text + found[0] + '"')
    with pytest.raises(BuildError, match=f"found {edit.count + 1}"):
        edit.apply(tree)
    path.unlink()
    with pytest.raises(BuildError, match="there is no such file"):
        edit.apply(tree)


@pytest.mark.parametrize("line", ["import pkg_resources", "    from distutils import log", "import imp, sys"])
def test_a_module_that_is_no_more_is_an_error(line, tree):
    path = tree / "horovod/runner/launch.py"
    path.write_text(path.read_text() + f"\n{line.strip()}\n")
    with pytest.raises(BuildError, match=r"horovod/runner/launch\.py"):
        patches.apply_edits(tree)


def test_other_edits_make_other_wheels(monkeypatch):
    before = patches.digest()
    monkeypatch.setattr(patches, "EDITS", patches.EDITS[1:])
    assert patches.digest() != before


@pytest.mark.slow  # downloads CMake
def test_cmake_4_takes_the_edited_gloo_only(tree, tmp_path):
    tools = tmp_path / "tools"
    command = [*source.PIP, "install", "-q", "--target", str(tools), "cmake>=4"]
    subprocess.run(command, check=True, timeout=100, capture_output=True)

    def configure():
        (tmp_path / "build").mkdir()
        done = subprocess.run(
            [tools / "bin" / "cmake", str(tree / "third_party/gloo")],
            env={**os.environ, "PYTHONPATH": str(tools)},
            cwd=tmp_path / "build",
            capture_output=True,
            text=True,
        )
        shutil.rmtree(tmp_path / "build")
        return done

    refused = configure()
    assert refused.returncode != 0 and "CMake < 3.5 has been removed" in refused.stderr
    patches.apply_edits(tree)
    taken = configure()
    assert taken.returncode == 0, taken.stderr
