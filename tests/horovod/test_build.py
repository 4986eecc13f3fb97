"""`sparkdist horovod build`: from the cache, and what is said when it cannot be done."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from sparkdist.errors import ConfigurationError
from sparkdist.horovod.build.diagnosis import BuildError, first_cause
from sparkdist.horovod.build.plan import Wish, make_plan
from sparkdist.horovod.build.toolchain import Toolchain
from tests import support
from tests.horovod.conftest import CACHE, make_venv

pytestmark = pytest.mark.slow  # environments of their own


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


# --- what is there already ----------------------------------------------------------------------


def test_a_wheel_from_the_cache_is_installed_and_proven(venv):
    assert "the wheel is from the cache" in venv.first
    assert "proven: an allreduce of two ranks, with torch" in venv.first
    assert (venv.site / "horovod").is_dir()
    done = subprocess.run([venv.python, "-m", "pip", "check"], capture_output=True, text=True)
    assert "horovod" not in done.stdout


def test_what_is_installed_and_proven_is_left_alone(venv):
    before = (venv.site / "horovod").stat().st_mtime_ns
    started = time.monotonic()
    done = venv.sparkdist("build")
    took = time.monotonic() - started
    assert done.returncode == 0 and "nothing to do" in done.stdout
    assert took < 5
    assert (venv.site / "horovod").stat().st_mtime_ns == before
    # Insisting on what is there anyway is the same wish.
    assert "nothing to do" in venv.sparkdist("build", "--with", "torch").stdout


def test_the_wheel_can_be_had_too_and_waits_for_who_builds_it(venv, tmp_path):
    stamp = json.loads(next(venv.site.glob("horovod-*.dist-info/sparkdist.json")).read_text())
    (wheel,) = (CACHE / stamp["key"]).glob("*.whl")
    with wheel.parent.with_name(f"{wheel.parent.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            venv.command("build", "--wheel-dir", str(tmp_path / "wheels")),
            env=venv.environ(PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout and "waiting" in process.stdout.readline()
        assert process.poll() is None
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    (copied,) = (tmp_path / "wheels").iterdir()
    assert copied.read_bytes() == wheel.read_bytes()
    names = zipfile.ZipFile(copied).namelist()
    assert any(name.endswith(".dist-info/sparkdist.json") for name in names)
    assert any(name.startswith("horovod/torch/mpi_lib_v2") for name in names)


@pytest.mark.slow
def test_a_lost_extension_is_put_back_and_all_of_it_removed(tmp_path):
    venv = make_venv(tmp_path / "env")
    assert venv.sparkdist("build").returncode == 0
    (extension,) = (venv.site / "horovod" / "torch").glob("*.so")
    extension.unlink()
    done = venv.sparkdist("build")
    assert done.returncode == 0 and "installed Horovod 0.28.1" in done.stdout
    assert extension.is_file()
    done = venv.sparkdist("build", "--uninstall")
    assert done.returncode == 0 and done.stdout == "removed Horovod 0.28.1\n"
    assert not list(venv.site.glob("horovod*"))
    assert "nothing to do" in venv.sparkdist("build", "--uninstall").stdout


# --- what is asked for cannot be ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--version", "0.27.0"], 2, "'0.27.0' is not one of '0.28.0', '0.28.1'"),
        (["--without", "torch"], 2, "nothing to build without torch"),
        (["--without", "gloo", "--without", "mpi"], 2, "without gloo, Horovod needs MPI"),
        (["--with", "torch", "--without", "torch"], 2, "torch cannot be both"),
        (["--jobs", "0"], 2, "--jobs"),
        (["--with", "mxnet"], 1, "mxnet is not installed in this Python: pip install mxnet"),
    ],
)
def test_a_wish_that_cannot_be_met(venv, args, code, said):
    done = venv.sparkdist("build", *args)
    assert done.returncode == code and said in last_line(done)


def test_without_any_framework(empty):
    done = empty.sparkdist("build")
    assert done.returncode == 1 and last_line(done).endswith("pip install torch")


@pytest.mark.parametrize(
    ("programs", "env", "said"),
    [
        ([], {}, "make is not on PATH"),
        (["make"], {}, "no C++ compiler: neither c++ nor g++ nor clang++ is on PATH. Install"),
        (["make", "c++"], {"CXX": "icpx -fast"}, "no C++ compiler: CXX=icpx -fast is on PATH"),
        (["make", "c++"], {"HOROVOD_WITH_MPI": "1"}, "mpicxx is not on PATH: on Debian apt-get install"),
        (["make", "c++"], {"HOROVOD_GPU_ALLREDUCE": "NCCL"}, "nccl.h (package libnccl-dev)"),
    ],
)
def test_a_missing_program_is_named(venv, tmp_path, programs, env, said):
    for name in programs:
        (tmp_path / name).symlink_to(shutil.which(name))
    done = venv.sparkdist("build", PATH=str(tmp_path), **env)
    assert done.returncode == 1
    assert said in last_line(done)


def test_what_a_build_for_gpus_lacks_is_named(tmp_path):
    tools = Toolchain("cp", "c++", {"torch": "2.5"}, torch_cuda="12.4")
    with pytest.raises(BuildError, match=r"nvcc \(package cuda-nvcc-12-4\).*nccl\.h"):
        make_plan(Wish(gpu=True), tools)
    assert "--gpu insists" in make_plan(Wish(), tools).notes[0]
    for name in ("bin/nvcc", "include/cuda_runtime.h", "include/nccl.h", "lib/libnccl.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    tools = Toolchain("cp", "c++", {"torch": "2.5"}, torch_cuda="12.4", cuda=tmp_path)
    assert make_plan(Wish(), tools).env["HOROVOD_GPU_ALLREDUCE"] == "NCCL"
    assert "HOROVOD_GPU_ALLREDUCE" in make_plan(Wish(gpu=False), tools).unset


def test_a_plan_is_another_for_all_that_makes_another_wheel():
    tools = Toolchain("cp311", "c++ 12", {"torch": "2.5", "tensorflow": "2.17"}, environ={})
    plan = make_plan(Wish(), tools)
    assert plan.optional == {"tensorflow"}
    others = [
        make_plan(Wish(version="0.28.0"), tools),
        make_plan(Wish(excluded=frozenset({"tensorflow"})), tools),
        make_plan(Wish(included=frozenset({"tensorflow"})), tools),
        make_plan(Wish(), Toolchain("cp312", "c++ 12", tools.frameworks)),
        make_plan(Wish(), Toolchain("cp311", "c++ 13", tools.frameworks)),
        make_plan(Wish(), Toolchain("cp311", "c++ 12", {"torch": "2.6", "tensorflow": "2.17"})),
        make_plan(Wish(), Toolchain("cp311", "c++ 12", tools.frameworks, environ={"CXXFLAGS": "-g"})),
        make_plan(
            Wish(), Toolchain("cp311", "c++ 12", tools.frameworks, environ={"HOROVOD_CPU_OPERATIONS": "GLOO"})
        ),
    ]
    assert len({plan.key, *(other.key for other in others)}) == len(others) + 1
    same = Toolchain("cp311", "c++ 12", tools.frameworks, environ={"HOROVOD_RANK": "1", "HOME": "/x"})
    assert make_plan(Wish(), same).key == plan.key
    given = Toolchain("cp311", "c++ 12", tools.frameworks, environ={"HOROVOD_WITHOUT_TENSORFLOW": "1"})
    assert "tensorflow" not in make_plan(Wish(), given).frameworks
    with pytest.raises(ConfigurationError, match=r"0\.28\.1"):
        make_plan(Wish(version="0.19"), tools)


# --- builds that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CXX", "/bin/false", '"/bin/false" is not able to compile'),
        pytest.param(
            *("HOROVOD_BUILD_ARCH_FLAGS", "-mno-such-flag", "-mno-such-flag"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_failed_build_ends_with_its_cause_and_the_log(venv, fresh_cache, variable, value, said):
    done = venv.sparkdist("build", "--rebuild", "--jobs", "1", **fresh_cache, **{variable: value})
    assert done.returncode == 1
    assert said in last_line(done)
    log = Path(last_line(done).rpartition("(log: ")[2].removesuffix(")"))
    assert log.is_file() and said.split()[-1] in log.read_text()
    assert not list(log.parents[1].glob("0.28.1-*/"))


def test_the_cause_is_the_first_line_that_tells_it():
    def cause(*lines):
        return first_cause("\n".join(lines))

    compiler = "/x/gloo/types.h:41:3: error: 'uint8_t' does not name a type"
    pip = "error: subprocess-exited-with-error"
    assert cause("  [ 3%] Building", f"  {compiler}", "gmake: *** [all] Error 2", pip) == compiler
    assert "out of memory" in cause("c++: fatal error: Killed signal terminated program cc1plus", pip)
    assert cause("/usr/bin/ld: cannot find -lpython3", "collect2: error: ld returned 1 exit status").endswith(
        "cannot find -lpython3"
    )
    assert cause(pip, "ERROR: No matching distribution found for horovod==0.28.1") == (
        "ERROR: No matching distribution found for horovod==0.28.1"
    )
    assert cause("RuntimeError: CMake failed: no such file", pip).startswith("RuntimeError: CMake failed")
    assert cause("all is well") == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_compiler_and_no_half_wheel(venv, fresh_cache, number):
    cache = Path(fresh_cache["XDG_CACHE_HOME"], "sparkdist", "horovod")
    process = subprocess.Popen(
        venv.command("build", "--rebuild", "--jobs", "1"),
        env=venv.environ(**fresh_cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert support.wait_until(
            lambda: any("Building CXX" in log.read_text() for log in cache.glob("logs/*.log")), 90
        )
        started = support.descendants([process.pid])
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 1 and errors.endswith("Aborted!\n")
    assert len(started) > 2 and not started & support.parents().keys()
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["logs", "source"]
    assert not list(Path(tempfile.gettempdir()).glob("sparkdist-horovod-*"))
