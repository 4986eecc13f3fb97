"""pytest's plumbing: the Spark session, the check that a run leaves nothing, skips in CI."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from sparkdist.driver.board import Board
from tests import support

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
CONNECT_TESTS = Path(__file__).with_name("connect")

# Whatever a test starts, Spark's JVM and its Python workers included, inherits this.
os.environ.setdefault(support.TEST_MARKER, uuid.uuid4().hex)
# Spark would start its workers with whatever python3 is first on PATH.
os.environ["PYSPARK_PYTHON"] = sys.executable


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A real session on `local[2]`."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .appName("sparkdist tests")
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", 2)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves tests/connect out unless it was named: a process holds a classic session or Connect's."""
    if collection_path != CONNECT_TESTS:
        return None
    named = (Path(arg.partition("::")[0]).absolute() for arg in config.args)
    return None if any(path.is_relative_to(CONNECT_TESTS) for path in named) else True


@pytest.fixture
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Asserts that the test left this process as it was, no socket, and within 5 s no process."""
    if "spark" in request.fixturenames:
        request.getfixturevalue("spark")  # what a session starts is no leak of the test
    before, listening = support.own_state(), support.listeners()
    yield
    assert support.own_state() == before
    if not support.wait_until(lambda: not support.run_processes(), 5):
        pytest.fail(f"of a run, these still live:\n{support.describe(support.run_processes())}")
    # After the processes: what a rank still held would not be ours to blame.
    if not support.wait_until(lambda: not support.listeners() - listening, 5):
        pytest.fail(f"these still listen: {support.listeners() - listening}")


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[Board]:
    """The boards of the test's attempts, as they come; the last one made is the last attempt's."""
    made: list[Board] = []
    make = Board.__init__

    def remember(self: Board, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(Board, "__init__", remember)
    return made


class OtherPython(NamedTuple):
    """An interpreter of another minor version than this one."""

    path: Path
    version: str


@pytest.fixture(scope="session")
def other_python() -> OtherPython:
    """A real interpreter of another minor version, from PATH or among pyenv's; without one, a skip."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    folders = [Path(p) for p in os.environ["PATH"].split(os.pathsep)] + sorted(pyenv.glob("*/bin"))
    show = "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"
    for path in (found for folder in folders for found in folder.glob("python3.1[0-9]")):
        done = subprocess.run([path, "-c", show], capture_output=True, text=True)
        executable, _, version = done.stdout.strip().rpartition(" ")
        if executable and version != "{}.{}".format(*sys.version_info):
            return OtherPython(Path(executable), version)
    pytest.skip("no Python of another minor version is installed")


# --- a skipped test is a failure in CI ----------------------------------------------------------


def _allowed_skips() -> list[str]:
    """Reads the globs of the tests that may be skipped."""
    lines = ALLOWED_SKIPS.read_text().splitlines()
    entries = [line.partition("  # ") for line in lines if line and not line.startswith("#")]
    for glob, _, reason in entries:
        if not reason.strip():
            raise pytest.UsageError(f"{ALLOWED_SKIPS.name}: {glob!r} needs a reason, behind '  # '")
    return [glob.strip() for glob, _, _ in entries]


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    # A test that is expected to fail is as good as skipped, whether it then fails or not.
    expected = getattr(report, "wasxfail", None)
    if os.environ.get("CI") != "true" or not (report.skipped or expected is not None):
        return
    # A parameter's brackets would be read as a set of characters: hence the equality.
    if any(report.nodeid == glob or fnmatchcase(report.nodeid, glob) for glob in _allowed_skips()):
        return
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else f"expected to fail: {expected}"
    report.outcome = "failed"
    report.longrepr = f"skipped in CI, and {ALLOWED_SKIPS.name} does not list {report.nodeid}: {why}"
    report.__dict__.pop("wasxfail", None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a test's skip into a failure."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turns a whole module's skip into a failure."""
    report = yield
    _fail_if_skipped(report)
    return report
