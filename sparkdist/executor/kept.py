"""What ranks keep on their node for later attempts of their run: a folder in the forkserver's own.

Its name says for how many seconds it is kept once no agent uses it, its mtime when one last did, and
a lock whether one does now. So an agent that is killed leaves what one that ends does, and a
forkserver needs to know of no run.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from pathlib import Path

_FOLDER = "kept"


class Kept:
    """A run's folder, held by the agent that makes or finds it.

    Args:
        runs: The folder of the forkserver.
        run_id: The run.
        seconds: How long it stays for another attempt; 0 where none may come.

    Attributes:
        path: Its path.
        is_done: Whether this node's ranks have all done what they were to do.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, runs: Path, run_id: str, seconds: float) -> None:
        self.path = runs / _FOLDER / f"{run_id}-{math.ceil(seconds)}"
        self.is_done = False
        self._is_last = not seconds
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self._lock = self._hold()

    def _hold(self) -> int:
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # the forkserver found it empty, and nobody's yet
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:  # not one that was just being removed
                return lock
            os.close(lock)

    def leave(self) -> None:
        """Removes it, or leaves it to another attempt."""
        if self.is_done or self._is_last:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            os.utime(self._lock)
        os.close(self._lock)


def sweep(runs: Path) -> bool:
    """Removes folders that are empty or that no attempt has come back for; says whether any is left."""
    try:
        paths = list((runs / _FOLDER).iterdir())
    except OSError:
        return False  # none was ever made, or all is gone
    stay = [_stays(path) for path in paths]
    return any(stay)


def _stays(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False  # its agent has just removed it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        until = os.fstat(fd).st_mtime + float(path.name.rpartition("-")[2])
        if os.listdir(fd) and time.time() < until:
            return True
        shutil.rmtree(path, ignore_errors=True)
        return False
    except BlockingIOError:
        os.utime(fd)
        return True
    finally:
        os.close(fd)
