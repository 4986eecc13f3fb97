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

from tests import support

ROOT = Path(__file__).parents[2]


class Driver:
    """What `tests.faults.driver` does, and what it printed meanwhile.

    Attributes:
        process: Its process.
        printed: Its other lines.
        ready: What it said once its session had started.
    """

    def __init__(self, where: str, *confs: str, prefix: Sequence[str] = ()) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.printed: list[str] = []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.faults.driver", where, *confs],
            env=environ,
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal would reach the JVM as well; pyspark keeps it from that by itself.
            start_new_session=True,
        )
        self.ready: dict[str, Any] = {}

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
def driver(where: str, *confs: str, prefix: Sequence[str] = ()) -> Iterator[Driver]:
    """Starts a driver; its own server and all else that it started ends with it."""
    made = Driver(where, "spark.ui.enabled=false", *confs, prefix=prefix)
    try:
        made.ready = made.hear()
        assert prefix or made.ready["ready"] == made.process.pid
        yield made
    finally:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.communicate()


def pids_of(folder: Path) -> set[int]:
    """Waits until both ranks of a run have announced themselves."""
    assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(folder)), 60)
    return {int((folder / rank).read_text()) for rank in "01"}


def end(pids: set[int], seconds: float) -> None:
    """Asserts that these processes end within so many seconds."""
    assert support.wait_until(lambda: not pids & support.parents().keys(), seconds), support.describe(pids)
