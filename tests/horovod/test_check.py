"""`sparkdist horovod check`, and what Horovod's errors mean."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig

import pytest

from sparkdist.horovod.build import diagnose
from tests.horovod.conftest import SITE, make_venv

pytestmark = pytest.mark.slow  # environments of their own


@pytest.fixture
def extension(venv):
    """Horovod's extension for torch, put back afterwards."""
    (path,) = (venv.site / "horovod" / "torch").glob("mpi_lib_v2*.so")
    saved = path.with_suffix(".saved")
    path.rename(saved)
    yield path
    path.unlink(missing_ok=True)
    saved.rename(path)


def test_an_extension_that_works(venv):
    done = venv.sparkdist("check")
    assert done.returncode == 0, done.stdout
    assert "torch: works (built for " in done.stdout and "gloo" in done.stdout
    done = venv.sparkdist("check", "--json")
    report = json.loads(done.stdout)
    (torch,) = [found for found in report["extensions"] if found["framework"] == "torch"]
    assert done.returncode == 0 and report["works"] and report["version"] == "0.28.1"
    assert torch["works"] and torch["built_for"] == torch["now"] and torch["problem"] is None
    assert torch["backends"]["gloo"] is True and set(torch["backends"]) == {"gloo", "mpi", "nccl", "cuda"}
    assert report["built_for"]["compiler"]


def test_no_horovod(empty):
    done = empty.sparkdist("check")
    assert done.returncode == 1
    assert "Horovod is not installed" in done.stdout and "$ sparkdist horovod build\n" in done.stdout
    report = json.loads(empty.sparkdist("check", "--json").stdout)
    assert report["problem"]["commands"] == ["sparkdist horovod build"] and not report["works"]


def test_an_extension_that_is_not_there(venv, extension):
    done = venv.sparkdist("check")
    assert done.returncode == 1
    assert "torch" in done.stdout and "without its extension for torch" in done.stdout
    assert "$ sparkdist horovod build --with torch\n" in done.stdout
    # That is what Horovod itself says.
    code = "import horovod.torch as hvd; hvd.init()"
    done = subprocess.run([venv.python, "-c", code], capture_output=True, text=True)
    for said in (done.stdout, done.stderr):
        found = diagnose(said)
        assert found is not None and found.commands == ("sparkdist horovod build --with torch",)


def test_an_extension_for_another_abi(venv, extension):
    include = sysconfig.get_path("include")
    code = "extern int no_such_thing; int *pointer = &no_such_thing;"
    command = ["c++", "-shared", "-fPIC", f"-I{include}", "-x", "c++", "-", "-o", str(extension)]
    subprocess.run(command, input=code, text=True, check=True)
    done = venv.sparkdist("check")
    assert done.returncode == 1
    assert "undefined symbol no_such_thing" in done.stdout
    assert "$ sparkdist horovod build --rebuild\n" in done.stdout


def test_another_torch_than_it_was_built_for(venv):
    (link,) = venv.lens.glob("torch-*.dist-info")
    other = venv.lens / "torch-2.99.0.dist-info"
    link.unlink()
    try:
        other.mkdir()
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
        done = venv.sparkdist("check")
        assert "and 2.99.0 is installed" in done.stdout and "$ sparkdist horovod build\n" in done.stdout
        # And it would be built anew.
        done = venv.sparkdist("build", PATH="/nowhere")
        assert done.returncode == 1 and "make is not on PATH" in done.stderr
    finally:
        shutil.rmtree(other)
        link.symlink_to(SITE / link.name)


@pytest.mark.parametrize(
    ("said", "cause", "command"),
    [
        (ModuleNotFoundError("No module named 'horovod'"), "not installed", "sparkdist horovod build"),
        (
            ModuleNotFoundError("No module named 'horovod.torch.mpi_lib_v2'"),
            "incomplete",
            "build --with torch",
        ),
        (
            ImportError("libcudart.so.11.0: cannot open shared object file: No such file"),
            "libcudart",
            "--rebuild",
        ),
        (ImportError("/l/libstdc++.so.6: version `GLIBCXX_3.4.32' not found"), "GLIBCXX_3.4.32", "--rebuild"),
        ("ValueError: Gloo support has not been built.  If this", "without gloo", "--with gloo"),
        (ValueError("Horovod has not been built with MPI support. Ensure"), "without MPI", "--with mpi"),
        ("ModuleNotFoundError: No module named 'distutils'", "no longer has", "--rebuild"),
        ("ModuleNotFoundError: No module named 'yaml'", "needs yaml", "pip install cloudpickle"),
        ("No module named 'tensorflow'", "tensorflow is not installed", "pip install tensorflow"),
    ],
)
def test_what_errors_mean(said, cause, command):
    found = diagnose(said)
    assert found is not None and cause in found.cause
    assert any(command in line for line in found.commands)


def test_horovods_own_errors_mean_something():
    code = """
from horovod.common.exceptions import HorovodVersionMismatchError as Mismatch, get_version_mismatch_message
from sparkdist.horovod.build import diagnose
print(diagnose(Mismatch("pytorch", "2.2.0", "2.1.0")).cause)
print(diagnose(get_version_mismatch_message("pytorch", "2.2.0+cpu", "2.1.0")).cause)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "Horovod was built against torch 2.1.0, and 2.2.0 is installed",
        "Horovod was built against torch 2.1.0, and 2.2.0+cpu is installed",
    ], done.stderr


@pytest.mark.parametrize("unknown", ["", "all is well", ValueError("loss is NaN"), KeyError("rank")])
def test_what_is_not_horovods_is_not_explained(unknown):
    assert diagnose(unknown) is None


def test_ranks_that_have_none_say_how_to_get_it(tmp_path):
    bare = make_venv(tmp_path / "bare")
    code = "from sparkdist import Launcher; Launcher('horovod', local_mode=True).run(print)"
    done = subprocess.run([bare.python, "-c", code], env=bare.environ(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "PreflightError" in done.stderr and "`sparkdist horovod build` installs Horovod" in done.stderr
