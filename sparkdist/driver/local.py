"""A run on the driver itself: the same agent and ranks, without Spark."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sparkdist.driver.bootstrap import unpack_package
from sparkdist.driver.parcel import package_zip
from sparkdist.errors import PreflightError
from sparkdist.executor.leader import Row, Site, lead
from sparkdist.executor.order import Order
from sparkdist.executor.shortage import unusable
from sparkdist.executor.topology import Node
from sparkdist.executor.warm import HOME

_ROOT = str(Path(__file__).absolute().parents[2])
IMPORTING = "still importing the framework"


class LocalRun:
    """One attempt on the driver.

    Args:
        order: The attempt.
        function: The pickled function and its arguments; empty for a script.
        parcel: A zip of what ranks get as files.
        environ: Variables that ranks get beyond the driver's own.
        packages: The folder in which the order's environment was unpacked, or None without one.
    """

    def __init__(
        self,
        order: Order,
        function: bytes,
        parcel: bytes,
        environ: Mapping[str, str],
        packages: Path | None = None,
    ) -> None:
        self._order = order
        self._function = function
        self._parcel = parcel
        self._environ = environ
        self._packages = packages
        self._agent: socket.socket | None = None
        self._cancelled = False

    def run(self) -> list[Row]:
        """Runs the ranks to their end and returns their rows; to be called in a thread of its own.

        Raises:
            NodeError: The ranks could not be started.
        """
        node = Node(0, (0,), (self._order.world_size,))
        rows = lead(self._order, node, self._site(), self._function, self._parcel, self._connected)
        return [*rows, ({"kind": "task", "partition": 0}, b"")]

    def _site(self) -> Site:
        base = own_folder(os.getpid())
        # With an environment, not the folder that this package is in: it may hold all of the driver's.
        root = unpack_package(str(base), *package_zip()) if self._packages else _ROOT
        return Site(
            root=root,
            base=base,
            parent=os.getpid(),
            sys_path=tuple(os.path.abspath(entry) for entry in sys.path),
            cwd=os.getcwd(),
            environ=dict(self._environ),
            packages=self._packages,
            pyspark=_pyspark() if self._packages else (),
        )

    def _connected(self, agent: socket.socket) -> None:
        self._agent = agent
        if self._cancelled:  # while the framework was being imported
            self.cancel()

    def cancel(self) -> None:
        """Ends the agent, and with it the ranks, at once, or as soon as there is one."""
        self._cancelled = True
        if self._agent:
            try:
                self._agent.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended by itself

    def is_unheard(self) -> bool:
        """Says that agents on the driver reach it."""
        return False

    def lost_executor(self) -> bool:
        """Says that there is none."""
        return False

    def waiting_for(self) -> str:
        """Says what a run waits for before its agent reports."""
        return IMPORTING

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Returns a plain thread."""
        return threading.Thread(target=target, name="sparkdist-run", daemon=True)


def _pyspark() -> tuple[str, ...]:
    """Returns from where an environment without pyspark may import the driver's, and nothing else."""
    spec = find_spec("pyspark")
    folder = Path((spec and spec.origin) or "").parent
    # Installed by pip, or part of a Spark distribution.
    return tuple(
        str(path) for lib in ("python/lib", "../lib") for path in sorted((folder / lib).glob("*.zip"))
    )


def own_folder(pid: int) -> Path:
    """Returns this process's folder for forkservers; they end when it is gone.

    Raises:
        PreflightError: The temporary folder cannot be used.
    """
    if not _made_folder(pid).is_dir():
        _made_folder.cache_clear()  # a cleaner of /tmp was there
    return _made_folder(pid)


@cache
def _made_folder(pid: int) -> Path:
    try:
        folder = tempfile.mkdtemp(prefix=HOME.format(pid=pid))
    except OSError as error:
        raise PreflightError(unusable(tempfile.tempdir, error, "TMPDIR, or tempfile.tempdir")) from error
    atexit.register(_remove, folder, pid)
    return Path(folder)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork of the driver
        shutil.rmtree(folder, ignore_errors=True)
