"""The `clean` fixture sees what it must: leaks made on purpose, by real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import sessions, support, traces

# A server that forks one child; both wait for their stdin to end. "listen": it is open to runs. A path is
# of a file that they hold open.
SERVER = """
import os, socket, sys
kept = [open(word) for word in sys.argv if word.startswith("/")]
if "listen" in sys.argv:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\\0" + str(os.getpid()))
    listener.listen()
child = "child" in sys.argv and os.fork() == 0
os.write(1, b"x")
sys.stdin.read()
"""


@contextmanager
def started(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with some variables, in a session of its own, ready when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout
        for _ in range(2 if "child" in arguments else 1):
            assert process.stdout.read(1) == b"x"
        yield process
        assert process.stdin
        process.stdin.close()


def test_a_forkserver_may_stay_and_its_child_may_not():
    before = support.forkservers()  # of tests that ran earlier
    with started("listen", "child", **{support.FORKSERVER_MARKER: "key"}) as server:
        (child,) = support.descendants([server.pid])
        assert support.forkservers() - before == {server.pid}
        assert support.run_processes() == {child}
        os.kill(child, signal.SIGKILL)
        assert support.wait_until(lambda: not support.run_processes(), 5)


def test_an_orphan_of_a_dead_forkserver_is_seen():
    before = support.forkservers()
    with started("child", **{support.FORKSERVER_MARKER: "key"}) as server:
        (child,) = support.descendants([server.pid])
        os.kill(server.pid, signal.SIGKILL)
        assert support.wait_until(lambda: server.pid not in support.parents(), 5)
        assert support.forkservers() <= before
        assert support.run_processes() == {child}


def test_a_process_of_a_run_is_seen_and_described():
    with started(**{support.RUN_MARKER: "some-run"}) as process:
        assert support.run_processes() == {process.pid}
        assert str(process.pid) in support.describe([process.pid])


def test_an_orphan_of_another_test_session_is_not_ours():
    with started("child", **{support.RUN_MARKER: "some-run", support.TEST_MARKER: "other"}) as process:
        (child,) = support.descendants([process.pid])
        os.kill(process.pid, signal.SIGKILL)
        assert support.wait_until(lambda: process.pid not in support.parents(), 5)
        assert support.run_processes() == set()
        assert child in support.parents()


def test_a_listening_socket_is_seen():
    before = support.listeners()
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = support.listeners() - before
        assert (found.pid, found.port) == (os.getpid(), server.getsockname()[1])
    assert support.listeners() == before


def test_a_forkserver_outlives_an_application_only_if_it_is_the_drivers_own(tmp_path: Path):
    before = sessions.outliving()
    own = json.dumps({"parent": [os.getpid(), 0], "folder": str(tmp_path)})
    workers = json.dumps({"parent": [1, 0], "folder": str(tmp_path)})
    with started("listen", own, **{support.FORKSERVER_MARKER: "key"}) as process:
        assert sessions.outliving() == before
        (tmp_path / "lifeline-of-an-application").symlink_to(tmp_path / "gone")
        assert sessions.outliving() - before == {process.pid}
    with started("listen", workers, **{support.FORKSERVER_MARKER: "key"}) as process:
        assert sessions.outliving() - before == {process.pid}


def test_garbage_is_no_trace():
    before = traces.traces()
    loop: list[object] = [socket.socket()]
    loop.append(loop)
    assert traces.since(before)
    del loop
    assert not traces.since(before)


def test_shared_memory_that_processes_of_others_use_is_not_ours():
    path = traces.SHARED_MEMORY / f"sparkdist-test-{os.getpid()}"
    trace = f"the shared memory {path.name}"
    path.touch()
    try:
        with started("child", str(path), **{support.TEST_MARKER: "other"}) as process:
            assert trace in traces.traces()  # they are still below this process
            os.kill(process.pid, signal.SIGKILL)
            assert support.wait_until(lambda: trace not in traces.traces(), 5)
        assert support.wait_until(lambda: trace in traces.traces(), 5)
    finally:
        path.unlink()


LEAKS = {
    "environ": "import os\ndef test_it(clean): os.environ['LEFT'] = 'over'",
    "cwd": "import os\ndef test_it(clean, tmp_path): os.chdir(tmp_path)",
    "handler": "import signal\ndef test_it(clean): signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "socket": "import socket\nkept = []\n"
    "def test_it(clean): kept.append(socket.create_server(('127.0.0.1', 0)))",
    "folder": "import tempfile\ndef test_it(clean): tempfile.mkdtemp()",
    "folder of a dead driver": "import tempfile\n"
    "def test_it(clean): tempfile.mkdtemp(prefix=f'sparkdist-{2**30}-')",
    "folder of a run": "import os, tempfile\nfrom pathlib import Path\n"
    "def test_it(clean):\n"
    "    own = tempfile.mkdtemp(prefix=f'sparkdist-{os.getpid()}-')\n"
    "    Path(own, 'sparkdist-fork-key', 'run-1').mkdir(parents=True)",
    "package that is half unpacked": "import tempfile\nfrom pathlib import Path\n"
    "def test_it(clean): Path(tempfile.gettempdir(), 'blockmgr-x', 'tmpabc').mkdir(parents=True)",
    "shared memory": "import os\nfrom pathlib import Path\nfrom tests import traces\n"
    "PATH = traces.SHARED_MEMORY / f'sparkdist-test-{os.getpid()}'\n"
    "def test_it(clean): PATH.touch()\n"
    "def teardown_module(): PATH.unlink()",
    "pipe": "import os\ndef test_it(clean): os.pipe()",
    "pidfd": "import os\ndef test_it(clean): os.pidfd_open(os.getpid())",
    "memory file": "import os\ndef test_it(clean): os.memfd_create('outcome')",
    # The last one, since it goes on living.
    "process": "import os, subprocess\n"
    "def test_it(clean): subprocess.Popen(['sleep', '30'], env={**os.environ, 'SPARKDIST_RUN_ID': 'x'})",
}
MAY_STAY = """
import os, tempfile
from pathlib import Path

def test_it(clean):
    own = tempfile.mkdtemp(prefix=f"sparkdist-{os.getpid()}-")
    Path(own, "sparkdist-fork-key").mkdir()
    Path(own, "sparkdist-0-digest").mkdir()
    Path(tempfile.gettempdir(), "blockmgr-x", "sparkdist-fork-key").mkdir(parents=True)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of its own, with our conftest; what leaks in its runs is not a leak here."""
    conftest = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(conftest.replace("PATIENCE = 5.0", "PATIENCE = 0.2"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv(support.TEST_MARKER, pytester.path.name)
    return pytester


def test_clean_fails_on_a_leak(project: pytest.Pytester):
    files = {f"test_{i:02}": text for i, text in enumerate(LEAKS.values())}
    project.makepyfile(**files)
    result = project.runpytest_subprocess("-rE")
    assert result.parseoutcomes() == {"passed": len(LEAKS), "errors": len(LEAKS)}
    result.stdout.fnmatch_lines([f"ERROR {name}.py::test_it*" for name in files])


def test_clean_passes_where_nothing_leaks(project: pytest.Pytester):
    project.makepyfile(test_nothing="def test_it(clean): ...", test_warm_servers=MAY_STAY)
    assert project.runpytest_subprocess().parseoutcomes() == {"passed": 2}
