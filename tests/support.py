"""What tests share: looking at runs' processes, at sockets, and at this process, through /proc.

A process may end while it is looked at; it then counts as gone. Only processes of this test
session are seen: they inherit TEST_MARKER from the environment that tests/conftest.py prepares.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEST_MARKER = "SPARKDIST_TEST_SESSION"
RUN_MARKER = "SPARKDIST_RUN_ID"
FORKSERVER_MARKER = "SPARKDIST_FORKSERVER"

_TCP_LISTEN = "0A"  # the state in /proc/net/tcp
_UNIX_LISTEN = 0x10000  # the flag in /proc/net/unix


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Polls until the condition holds; False if it still does not after that many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- processes ----------------------------------------------------------------------------------


def parents() -> dict[int, int]:
    """The parent of every live process; zombies do not count."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        # The name, in parentheses, may hold anything.
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if fields and fields[0] not in (b"Z", b"X"):
            found[pid] = int(fields[1])
    return found


def descendants(roots: Iterable[int]) -> set[int]:
    """Every live process below the roots, without them."""
    tree = parents()
    found: set[int] = set()
    newest = set(roots)
    while newest:
        newest = {pid for pid, parent in tree.items() if parent in newest} - found
        found |= newest
    return found


def start_environ(pid: int) -> dict[str, str]:
    """The environment a process was started with; a fork inherits it, later changes do not show."""
    pairs = (item.partition("=") for item in os.fsdecode(_read(pid, "environ")).split("\0"))
    return {name: value for name, _, value in pairs if name}


def session_processes() -> dict[int, dict[str, str]]:
    """The live processes of this test session with their start environments, without this one."""
    environs = {pid: start_environ(pid) for pid in parents()}
    below = descendants([os.getpid()])
    session = os.environ[TEST_MARKER]
    return {
        pid: environ
        for pid, environ in environs.items()
        if pid != os.getpid() and (pid in below or environ.get(TEST_MARKER) == session)
    }


def forkservers() -> set[int]:
    """The warm servers, which may outlive a run: topmost of their mark, and open to later runs.

    A rank or agent whose server died is topmost too, but listens for nobody. A server made for one
    run alone does not listen either, and has to end with it.
    """
    tree = parents()
    marked = {pid for pid, environ in session_processes().items() if FORKSERVER_MARKER in environ}
    return {
        pid for pid in marked if tree.get(pid) not in marked and sockets(pid) & _listening_unix_sockets(pid)
    }


def run_processes() -> set[int]:
    """The live processes of runs: all that carry a run's mark or a forkserver's, or stand below one."""
    servers = forkservers()
    return (marked() | descendants(servers)) - servers


def marked() -> set[int]:
    """The live processes that carry a run's mark or a forkserver's."""
    return {
        pid
        for pid, environ in session_processes().items()
        if RUN_MARKER in environ or FORKSERVER_MARKER in environ
    }


def hear(driver: subprocess.Popen[str]) -> dict[str, Any]:
    """What a driver of a test says next: a line of JSON behind an @."""
    assert driver.stdout
    for line in driver.stdout:
        if line.startswith("@"):
            return dict(json.loads(line[1:]))
    raise AssertionError("the driver ended")


def describe(pids: Iterable[int]) -> str:
    """One line for each process, for a message."""
    return "\n".join(f"  {pid}: {_command(pid)}" for pid in sorted(pids))


def arguments(pid: int) -> list[str]:
    """The words of a process's command line."""
    return os.fsdecode(_read(pid, "cmdline")).split("\0")[:-1]


def _command(pid: int) -> str:
    return " ".join(arguments(pid)).strip()[:200] or "(ended)"


# --- sockets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket and a process that holds it."""

    pid: int
    port: int
    inode: str


def listeners() -> set[Listener]:
    """The listening TCP sockets of this process and of the test session's, except Spark's own."""
    tree = parents()
    found = set()
    for pid in {os.getpid(), *session_processes()}:
        if not _is_spark(pid, tree):
            ports = _listening_tcp_sockets(pid)
            found |= {Listener(pid, ports[inode], inode) for inode in sockets(pid) & ports.keys()}
    return found


def _is_spark(pid: int, tree: dict[int, int]) -> bool:
    # The JVM, and the daemon that it starts Python workers from; the workers run our code.
    if _read(pid, "comm").strip() == b"java":
        return True
    return b"pyspark.daemon" in _read(pid, "cmdline") and _read(tree.get(pid, 0), "comm").strip() == b"java"


def tcp_sockets(pid: int) -> Iterator[list[str]]:
    """The fields of each line of a process's tables of TCP sockets."""
    # Through the process: it may be in a network namespace of its own.
    for table in ("net/tcp", "net/tcp6"):
        for line in _read(pid, table).decode().splitlines()[1:]:
            yield line.split()


def _listening_tcp_sockets(pid: int) -> dict[str, int]:
    return {
        fields[9]: int(fields[1].rpartition(":")[2], 16)
        for fields in tcp_sockets(pid)
        if fields[3] == _TCP_LISTEN
    }


def ports_of_spark() -> set[int | tuple[int, int]]:
    """The TCP ports on which JVMs of this test session listen, and those of their connections' two ends."""
    found: set[int | tuple[int, int]] = set()
    for pid in session_processes():
        if _read(pid, "comm").strip() == b"java":
            found.update(_listening_tcp_sockets(pid).values())
            held = sockets(pid)
            found.update(
                (int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16))
                for fields in tcp_sockets(pid)
                if fields[9] in held
            )
    return found


def _listening_unix_sockets(pid: int) -> set[str]:
    lines = (line.split() for line in _read(pid, "net/unix").decode(errors="replace").splitlines()[1:])
    return {fields[6] for fields in lines if int(fields[3], 16) & _UNIX_LISTEN}


def sockets(pid: int) -> set[str]:
    """The inodes of the sockets that a process holds."""
    return {target[len("socket:[") : -1] for target in descriptors(pid) if target.startswith("socket:[")}


def descriptors(pid: int) -> list[str]:
    """Where each descriptor of a process leads."""
    targets = []
    try:
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            try:
                targets.append(os.readlink(descriptor.path))
            except OSError:
                pass  # closed since
    except OSError:
        pass  # ended since
    return targets


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


# --- this process -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnState:
    """What a run must leave in this process as it found it."""

    environ: dict[str, str]
    cwd: str
    handlers: dict[int, object]


def own_state() -> OwnState:
    """The environment, the working folder and the signal handlers of this process."""
    # pytest names the running test, and the phase it is in, in a variable of its own.
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    # SIGALRM is pytest-timeout's, which takes its handler away as soon as a test has failed.
    numbers = signal.valid_signals() - {signal.SIGALRM}
    handlers: dict[int, object] = {int(number): signal.getsignal(number) for number in numbers}
    return OwnState(environ, str(Path.cwd()), handlers)
