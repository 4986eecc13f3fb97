"""Ctrl-C: the ranks are dead within 5 s, KeyboardInterrupt is raised, and the session goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from tests import support

# A user's driver. It is told what to launch, line by line, and says what came of it.
DRIVER = """
import json, signal, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from sparkdist import TorchDistributor
from tests.faults import programs

def say(**facts):
    print("\\n@" + json.dumps(facts), flush=True)

# Its making installs pyspark's own handler of SIGINT.
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
say(ready=signal.getsignal(signal.SIGINT).__module__)
for line in sys.stdin:
    order = json.loads(line)
    distributor = TorchDistributor(2, local_mode=order["local_mode"], launcher=order["launcher"], timeout=60)
    before = signal.getsignal(signal.SIGINT)
    try:
        distributor.run(programs.announce_and_wait, Path(order["folder"]), order["deaf"])
    except KeyboardInterrupt:
        raised = time.time()
    restored = signal.getsignal(signal.SIGINT) is before
    say(raised=raised, restored=restored, next=distributor.launch(programs.rank).values)
"""


class Driver:
    """A driver in a process of its own."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            env=environ,
            cwd=root,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal would reach the JVM as well; pyspark keeps it from that by itself.
            start_new_session=True,
        )

    def tell(self, **order: Any) -> None:
        assert self.process.stdin
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        return support.hear(self.process)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    try:
        assert driver.hear() == {"ready": "pyspark.core.context"}
        yield driver
    finally:
        driver.process.kill()
        driver.process.communicate()


def pids_of(folder: Path) -> list[int]:
    """Waits until both ranks have announced themselves."""
    assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(folder)), 60)
    return [int((folder / rank).read_text()) for rank in "01"]


def dead(pids: list[int]) -> bool:
    return not set(pids) & set(support.parents())


WAYS = [("fast", False), ("fast", True), ("torchrun", False), ("torchrun", True)]


@pytest.mark.parametrize("deaf", [False, True], ids=["", "ranks-ignore-sigterm"])
@pytest.mark.parametrize(("launcher", "local_mode"), WAYS)
def test_ctrl_c(driver: Driver, clean: None, tmp_path: Path, launcher, local_mode, deaf):
    driver.tell(launcher=launcher, local_mode=local_mode, deaf=deaf, folder=str(tmp_path))
    pids = pids_of(tmp_path)
    interrupted = time.time()
    driver.interrupt()
    assert support.wait_until(lambda: dead(pids), 5), support.describe(pids)
    said = driver.hear()
    assert said["raised"] - interrupted < 8
    assert said["restored"] and said["next"] == [0, 1]


@pytest.mark.parametrize("local_mode", [False, True], ids=["spark", "local"])
def test_ctrl_c_twice_does_not_wait_for_ranks_that_ignore_sigterm(
    driver: Driver, clean: None, tmp_path: Path, local_mode
):
    driver.tell(launcher="fast", local_mode=local_mode, deaf=True, folder=str(tmp_path))
    pids = pids_of(tmp_path)
    interrupted = time.time()
    driver.interrupt()
    # Two signals may become one before Python looks: the second comes when the first has had its effect.
    assert support.wait_until(lambda: {"asked-0", "asked-1"} <= set(os.listdir(tmp_path)), 5)
    driver.interrupt()
    assert support.wait_until(lambda: dead(pids), 1.5), support.describe(pids)
    said = driver.hear()
    assert said["raised"] - interrupted < 5
    assert said["restored"] and said["next"] == [0, 1]


# --- a notebook ---------------------------------------------------------------------------------

CELL = """
from pathlib import Path
from sparkdist import Launcher
from tests.faults import programs
Launcher("plain", num_processes=2).run(programs.announce_and_wait, Path({folder!r}))
"""


def test_an_interrupted_notebook_cell(clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(CELL.format(folder=str(tmp_path)))
        pids = pids_of(tmp_path)
        manager.interrupt_kernel()
        assert support.wait_until(lambda: dead(pids), 5), support.describe(pids)
        reply = reply_of(client)
        assert reply.get("ename") == "KeyboardInterrupt", reply
        client.execute("assert Launcher('plain', num_processes=2).launch(programs.rank).values == [0, 1]")
        reply = reply_of(client)
        assert reply["status"] == "ok", reply
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def reply_of(client: Any) -> dict[str, Any]:
    try:
        return client.get_shell_msg(timeout=30)["content"]
    except Empty:
        raise AssertionError("the kernel does not answer") from None
