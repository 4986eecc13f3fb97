"""Which limit an error met."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import socket
import subprocess
from collections.abc import Callable

from sparkdist.executor.shortage import shortage
from tests.faults.driving import drive
from tests.faults.test_limits import AS_USER

STARTS: dict[str, Callable[[], object]] = {
    "os.fork": lambda: os.fork() or os._exit(0),
    "os.posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "subprocess": lambda: subprocess.Popen(["true"]),
    "subprocess in a folder": lambda: subprocess.Popen(["true"], cwd="/"),
    "multiprocessing": lambda: start_by_multiprocessing("fork"),
    "multiprocessing's spawn": lambda: start_by_multiprocessing("spawn"),
}


def start_by_multiprocessing(way: str) -> None:
    multiprocessing.get_context(way).Process(target=print).start()  # type: ignore[attr-defined]


def receive_forked() -> None:
    forked, other = socket.socketpair()
    with forked, other:
        forked.setblocking(False)
        forked.recv(1) if forked else os.fork()  # a line that is not about what it names


def hint(action: Callable[[], object]) -> str:
    try:
        action()
    except BlockingIOError as error:
        return shortage(error)
    raise AssertionError("it did not fail")


def starve() -> dict[str, str]:
    """Tries every way to start a process where there may be no more."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return {name: hint(start) for name, start in STARTS.items()}


def test_a_process_that_cannot_be_started():
    program = "from tests.executor.test_shortage import starve; print(json.dumps(starve()))"
    told = json.loads(drive(program, within=AS_USER))
    assert set(told) == set(STARTS)
    for name, text in told.items():
        assert "no more processes or threads can be started" in text, name


def test_what_would_block_is_no_shortage():
    assert hint(receive_forked) == ""
