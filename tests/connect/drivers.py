"""Drivers in processes of their own, for what ends a process's one session or must not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Driver:
    """What `tests.connect.driver` does, and what it printed meanwhile."""

    def __init__(self, remote: str, *confs: str, prefix: Sequence[str] = ()) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.printed: list[str] = []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.connect.driver", remote, *confs],
            env=environ,
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, what: str, folder: Path | None = None, **order: Any) -> None:
        assert self.process.stdin
        line = json.dumps({"what": what, "folder": str(folder), **order})
        print(line, file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
            self.printed.append(line.rstrip("\n"))
        raise AssertionError(f"the driver ended: {self.printed[-20:]}")

    def does(self, what: str, folder: Path | None = None, **order: Any) -> dict[str, Any]:
        self.tell(what, folder, **order)
        return self.hear()


@contextmanager
def driver(remote: str, *confs: str, prefix: Sequence[str] = ()) -> Iterator[Driver]:
    """Starts a driver; its own server and all else that it started ends with it."""
    made = Driver(remote, *confs, prefix=prefix)
    try:
        pid = made.hear()["ready"]
        assert prefix or pid == made.process.pid
        yield made
    finally:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.communicate()
