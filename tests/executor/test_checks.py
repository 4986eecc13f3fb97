"""What executors must have like the driver is checked before any rank starts, and named."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sparkdist
from sparkdist import Launcher, PreflightError

HERE = "{}.{}".format(*sys.version_info)
PROMPT = 30.0  # s; mostly for Spark to start workers with an environment of their own, the session's first


@pytest.fixture
def theirs(spark, tmp_path, monkeypatch):
    """Returns a folder that executors, and not the driver, have first on their path."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    monkeypatch.setitem(spark.sparkContext.environment, "PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def ours(spark, tmp_path, monkeypatch):
    """Returns a folder of installed packages that only the driver has."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def refusal(launcher, entry):
    began = time.monotonic()
    with pytest.raises(PreflightError) as caught:
        launcher.run(entry)
    assert time.monotonic() - began < PROMPT
    assert f"the Python of {socket.gethostname()} ({sys.executable})" in str(caught.value)
    assert "environment=" in str(caught.value)
    return str(caught.value)


def plain():
    return Launcher("plain", num_processes=2, local_mode=False)


def install(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


# --- versions


def test_another_version_of_the_framework(clean, theirs):
    install(theirs, "torch", "1.2.3+cu99")
    message = refusal(Launcher("torch", num_processes=2, local_mode=False), os.getpid)
    assert "has torch 1.2.3, the driver has torch " in message


def test_another_build_of_the_frameworks_version_is_none(clean, theirs):
    from importlib import metadata

    install(theirs, "torch", metadata.version("torch").partition("+")[0] + "+cu999")
    assert Launcher("torch", local_mode=False).run(os.getpid)


def test_another_sparkdist_on_the_executors_path_is_not_used(clean, theirs):
    (theirs / "sparkdist").mkdir()
    (theirs / "sparkdist/__init__.py").write_text("raise RuntimeError('another sparkdist')")
    install(theirs, "sparkdist", "0.0.1")

    def where():
        import sparkdist

        return Path(sparkdist.__file__).read_text()

    assert plain().run(where) == Path(sparkdist.__file__).read_text()


MISMATCH = """
import json, os, sys

sys.path.append(sys.argv[1])
from pyspark.sql import SparkSession
from sparkdist import Launcher, PreflightError

spark = (
    SparkSession.builder.KIND("local[2]")
    .config("spark.ui.enabled", False)
    .config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)
try:
    Launcher("plain", num_processes=2).run(os.getpid)
except PreflightError as error:
    print(json.dumps(str(error)))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["master", "remote"])
def test_spark_workers_of_another_python(clean, other_python, kind):
    environ = {**os.environ, "PYSPARK_PYTHON": str(other_python.path)}
    root = str(Path(sparkdist.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", MISMATCH.replace("KIND", kind), root],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    message = json.loads(done.stdout)
    assert f"run Python {other_python.version}, the driver runs Python {HERE}" in message
    assert "PYSPARK_PYTHON" in message


# --- modules


def test_a_module_that_the_function_uses(clean, ours):
    (ours / "onlyhere.py").write_text("def f(): ...")
    import onlyhere

    def by_global():
        return onlyhere.f()

    def by_default(f=onlyhere.f):
        return f()

    def inside():
        import onlyhere

        return onlyhere.f()

    for function in (by_global, by_default, inside):
        assert "has no onlyhere, which the user's code imports" in refusal(plain(), function)


def test_the_first_of_several_is_named(clean, ours):
    for name in ("second_here", "first_here"):
        (ours / f"{name}.py").touch()

    def inside():
        import first_here  # noqa: F401
        import second_here  # noqa: F401

    assert "has no first_here," in refusal(plain(), inside)


def test_a_module_in_a_namespace_that_executors_have_too(clean, ours, theirs):
    (ours / "space/only_here").mkdir(parents=True)
    (ours / "space/only_here/__init__.py").touch()
    (theirs / "space/only_there").mkdir(parents=True)
    (theirs / "space/only_there/__init__.py").touch()

    def inside():
        from space import only_here

        return only_here

    assert "has no space.only_here," in refusal(plain(), inside)


def test_what_may_not_be_imported_is_not_asked_for(clean, ours):
    (ours / "optional_here.py").touch()

    def in_a_try():
        try:
            import optional_here  # noqa: F401
        except ImportError:
            return "without"

    def in_a_branch(wanted):
        if wanted:
            import optional_here  # noqa: F401
        return "without"

    def in_an_inner_function():
        def inner():
            import optional_here  # noqa: F401

        return "without", bool(inner)

    assert plain().run(in_a_try) == "without"
    assert plain().run(in_a_branch, False) == "without"
    assert plain().run(in_an_inner_function) == ("without", True)


def test_a_script_and_the_modules_that_travel_with_it(clean, ours, tmp_path):
    (ours / "onlyhere.py").touch()
    script = tmp_path / "train.py"
    script.write_text("try:\n    import onlyhere\nexcept ImportError: pass\nif 0:\n    import onlyhere\n")
    plain().run(script)
    script.write_text("import json\nimport onlyhere\n")
    assert "has no onlyhere," in refusal(plain(), script)
    script.write_text("import helper_of_it\n")
    (tmp_path / "helper_of_it.py").write_text("import onlyhere\n")
    assert "has no onlyhere," in refusal(plain(), script)
    (tmp_path / "helper_of_it.py").write_text("def f():\n    import onlyhere\n")
    plain().run(script)


def test_what_travels_in_other_ways_is_there(clean, ours, tmp_path, spark):
    (ours / "shipped_module.py").write_text("X = 1")

    def inside():
        import shipped_module

        return shipped_module.X

    assert plain_with(ship=[ours / "shipped_module.py"]).run(inside) == 1


def plain_with(**settings):
    return Launcher("plain", num_processes=2, local_mode=False, **settings)


def test_after_a_refusal_the_session_goes_on(clean, ours):
    (ours / "removed_later.py").touch()

    def inside():
        import removed_later

        return removed_later.__name__

    refusal(plain(), inside)
    assert plain().run(os.getpid)
    (ours / "removed_later.py").unlink()  # now nobody has it: the rank's own error says so
    with pytest.raises(sparkdist.TrainingFailed, match="No module named 'removed_later'"):
        plain().run(inside)
