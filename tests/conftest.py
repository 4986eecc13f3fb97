"""pytest's plumbing: the Spark session, the check that a run leaves nothing, skips in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from sparkdist.driver.board import Board
from tests import sessions, support, traces

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
CONNECT_TESTS = Path(__file__).with_name("connect")
FAULT_TESTS = Path(__file__).with_name("faults")

PATIENCE = 5.0  # s that what a run leaves gets to go

# pytest's own folders, which are looked at after a failure, stay where they were.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
# All else that appears in this session's temporary folder is a run's: the `clean` fixture counts it.
os.environ["TMPDIR"] = tempfile.tempdir = TEMP = tempfile.mkdtemp(prefix="sparkdist-tests-")

# Whatever a test starts, Spark's JVM and its Python workers included, inherits this.
os.environ.setdefault(support.TEST_MARKER, uuid.uuid4().hex)
# Spark would start its workers with whatever python3 is first on PATH.
os.environ["PYSPARK_PYTHON"] = sys.executable


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option."""
    parser.addoption("--connect", action="store_true", help="run tests/faults on a session of Spark Connect")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever names tests/connect wants Connect's session."""
    if any(path.is_relative_to(CONNECT_TESTS) for path in _named(config)):
        config.option.connect = True


def pytest_unconfigure() -> None:
    """Removes the temporary folder."""
    shutil.rmtree(TEMP, ignore_errors=True)


def _named(config: pytest.Config) -> Iterator[Path]:
    return (Path(arg.partition("::")[0]).absolute() for arg in config.args)


@pytest.fixture(scope="session")
def spark(pytestconfig: pytest.Config) -> Iterator[SparkSession]:
    """A real session on `local[2]`: a classic one, or with --connect a client's."""
    session = sessions.start(pytestconfig.option.connect)
    yield session
    sessions.stop(session)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves tests/connect out unless it was named: a process holds a classic session or Connect's."""
    return True if collection_path == CONNECT_TESTS and not config.option.connect else None


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On Connect, leaves out what does not depend on the session, or needs a SparkContext."""
    if not config.option.connect:
        return
    chosen = [item for item in items if _is_for_connect(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    seen: set[tuple[Path, str]] = set()
    for item in chosen:
        if not item.path.is_relative_to(CONNECT_TESTS):
            # What ranks do is the same as on a classic session: of each kind one case is quick.
            kind = (item.path, getattr(item, "originalname", item.name))
            if kind in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(kind)
    items[:] = chosen


def _is_for_connect(item: pytest.Item) -> bool:
    if item.path.is_relative_to(CONNECT_TESTS):
        return True
    if not item.path.is_relative_to(FAULT_TESTS) or item.get_closest_marker("classic"):
        return False
    ways = [str(way) for way in getattr(getattr(item, "callspec", None), "params", {}).values()]
    if any(way.endswith("-local") for way in ways):
        return False
    uses = {"spark", "where"} & set(getattr(item, "fixturenames", ()))
    return bool(uses) or any(way.endswith("-spark") for way in ways)


@pytest.fixture
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Asserts that the test left this process as it was and, soon, no process and no trace."""
    if "spark" in request.fixturenames:
        request.getfixturevalue("spark")  # what a session starts is no leak of the test
    before, listening, there = support.own_state(), support.listeners(), traces.traces()
    yield
    assert support.own_state() == before
    if not support.wait_until(lambda: not support.run_processes(), PATIENCE):
        pytest.fail(f"of a run, these still live:\n{support.describe(support.run_processes())}")
    # After the processes: what a rank still held would not be ours to blame.
    if not support.wait_until(lambda: not support.listeners() - listening, PATIENCE):
        pytest.fail(f"these still listen: {support.listeners() - listening}")
    if not support.wait_until(lambda: not traces.since(there), PATIENCE):
        pytest.fail(f"this was left: {', '.join(sorted(traces.since(there)))}")


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
