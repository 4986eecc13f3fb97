"""A launcher of the framework's own, such as torchrun, as one supervised child of the agent.

Its ranks are fresh interpreters that run `shim.py`, which ties each to the agent by the same pipes
and memory files as a forked rank has: it opens them through the agent's /proc folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdist.executor import process, worker
from sparkdist.frameworks import Place

if TYPE_CHECKING:
    from sparkdist.executor.staff import Staff


class NodeLauncher:
    """The launcher's process.

    Attributes:
        pid, pidfd: Its process.
        alive: Whether it has not been seen to end.
        exit_code: Its exit code, negative for a signal.
    """

    def __init__(self, staff: Staff, places: list[Place]) -> None:
        self.alive = True
        self.exit_code = 0
        self._told = os.memfd_create("sparkdist-told")
        spec = _memory_file(json.dumps(_spec(staff, places)).encode())
        shim = [str(Path(__file__).with_name("shim.py")), _path_of(spec)]
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                process.die_with_parent(parent)
                self._be_launcher(staff, places[0], shim)
            finally:
                os._exit(1)
        self.pidfd = os.pidfd_open(self.pid)

    def _be_launcher(self, staff: Staff, first: Place, shim: list[str]) -> None:
        worker.redirect(worker.Ends(*staff.ranks[0].pipes.theirs))
        worker.close_all_but(staff.library_fds | {0, 1, 2, self._told})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        orders = staff.orders(first)
        os.environ.clear()
        computed = staff.framework.rank_env(first)
        reserved = staff.framework.reserved_env  # the launcher sets these by itself, for each rank
        os.environ.update(staff.environ({n: v for n, v in computed.items() if n not in reserved}))
        os.chdir(orders["cwd"])
        tempfile.tempdir = str(staff.folder.path)  # torchrun would leave a folder in /tmp for every run
        code = 0
        try:
            codes = staff.framework.run_node(first, shim, staff.order.launcher_args)
            os.write(self._told, json.dumps(list(codes.items())).encode())
            code = 1 if codes else 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def signal(self, number: int) -> None:
        """Sends a signal to the launcher if it lives."""
        if self.alive:
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> dict[int, int]:
        """Takes the ended launcher's exit code; returns what it told, exit codes by local rank."""
        self.alive = False
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        told = os.pread(self._told, os.fstat(self._told).st_size, 0)
        return dict(json.loads(told or b"[]"))

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"ended with code {self.exit_code}"


def _spec(staff: Staff, places: list[Place]) -> Mapping[str, Any]:
    """Returns what the shim of each rank needs to become it."""
    function = _memory_file(staff.function)
    return {
        "root": staff.root,
        "function": _path_of(function),
        "ranks": [
            {"ends": [_path_of(fd) for fd in rank.pipes.theirs], "orders": staff.orders(place)}
            for rank, place in zip(staff.ranks, places, strict=True)
        ],
    }


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("sparkdist")
    with os.fdopen(fd, "wb", closefd=False) as stream:
        stream.write(data)
    return fd


def _path_of(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"
