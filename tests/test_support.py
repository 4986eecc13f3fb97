"""The `clean` fixture sees what it must: leaks made on purpose, by real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import support

# A server that forks one child; both wait for their stdin to end. "listen": it is open to runs.
SERVER = """
import os, socket, sys
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


LEAKS = {
    "environ": "import os\ndef test_it(clean): os.environ['LEFT'] = 'over'",
    "cwd": "import os\ndef test_it(clean, tmp_path): os.chdir(tmp_path)",
    "handler": "import signal\ndef test_it(clean): signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "socket": "import socket\nkept = []\n"
    "def test_it(clean): kept.append(socket.create_server(('127.0.0.1', 0)))",
    "process": "import os, subprocess\n"
    "def test_it(clean): subprocess.Popen(['sleep', '30'], env={**os.environ, 'SPARKDIST_RUN_ID': 'x'})",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_clean_fails_on_a_leak(leak, pytester, monkeypatch):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(test_it=LEAKS[leak])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    # A session of its own: what leaks there is not a leak here.
    monkeypatch.setenv(support.TEST_MARKER, f"{os.getpid()}-{leak}")
    outcomes = pytester.runpytest_subprocess().parseoutcomes()
    assert outcomes == {"passed": 1, "errors": 1}


def test_clean_passes_where_nothing_leaks(pytester, monkeypatch):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(test_it="def test_it(clean): ...")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    assert pytester.runpytest_subprocess().parseoutcomes() == {"passed": 1}
