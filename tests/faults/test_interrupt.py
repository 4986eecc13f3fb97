"""Ctrl-C: the ranks are dead within 5 s, KeyboardInterrupt is raised, and the session goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from tests import support
from tests.faults import drivers
from tests.faults.drivers import Driver, end, pids_of


@pytest.fixture(scope="module")
def driver(where: str) -> Iterator[Driver]:
    with drivers.driver(where) as made:
        # pyspark has installed its own handler by now.
        assert made.ready["handler"] == "pyspark.core.context"
        yield made


def settings_of(way: str) -> dict[str, Any]:
    launcher, place = way.split("-")
    return {"framework": "torch", "launcher": launcher, "local_mode": place == "local"}


WAYS = ["fast-spark", "fast-local", "torchrun-spark", "torchrun-local"]


@pytest.mark.parametrize("what", ["wait", "wait, deaf"])
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c(driver: Driver, clean: None, tmp_path: Path, way: str, what: str):
    driver.tell(what, tmp_path, settings=settings_of(way))
    pids = pids_of(tmp_path)
    interrupted = time.time()
    driver.process.send_signal(signal.SIGINT)
    end(pids, 5)
    said = driver.hear()
    assert (said["error"], said["restored"]) == ("KeyboardInterrupt", True)
    assert said["at"] - interrupted < 8
    assert driver.does("ranks", settings=settings_of(way))["values"] == [0, 1]


@pytest.mark.parametrize("way", ["fast-spark", "fast-local"])
def test_ctrl_c_twice_does_not_wait_for_ranks_that_ignore_sigterm(
    driver: Driver, clean: None, tmp_path: Path, way: str
):
    driver.tell("wait, deaf", tmp_path, settings=settings_of(way))
    pids = pids_of(tmp_path)
    interrupted = time.time()
    driver.process.send_signal(signal.SIGINT)
    # Two signals may become one before Python looks: the second comes when the first has had its effect.
    assert support.wait_until(lambda: {"asked-0", "asked-1"} <= set(os.listdir(tmp_path)), 5)
    driver.process.send_signal(signal.SIGINT)
    end(pids, 1.5)
    said = driver.hear()
    assert (said["error"], said["restored"]) == ("KeyboardInterrupt", True)
    assert said["at"] - interrupted < 5
    assert driver.does("ranks", settings=settings_of(way))["values"] == [0, 1]


# --- a notebook ---------------------------------------------------------------------------------

CELL = """
from pathlib import Path
from sparkdist import Launcher
from tests.faults import programs
Launcher("plain", num_processes=2).run(programs.announce_and_wait, Path({folder!r}))
"""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A notebook's kernel, and its client."""
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    manager, client = start_new_kernel(kernel_name="python3")
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_an_interrupted_notebook_cell(kernel: tuple[Any, Any], clean: None, tmp_path: Path):
    manager, client = kernel
    cell = client.execute(CELL.format(folder=str(tmp_path)))
    pids = pids_of(tmp_path)
    manager.interrupt_kernel()
    end(pids, 5)
    reply = reply_of(client, cell)
    assert reply.get("ename") == "KeyboardInterrupt", reply
    cell = client.execute("assert Launcher('plain', num_processes=2).launch(programs.rank).values == [0, 1]")
    reply = reply_of(client, cell)
    assert reply["status"] == "ok", reply


def reply_of(client: Any, cell: str) -> dict[str, Any]:
    try:
        while True:  # a slow kernel may still be answering who it is
            reply = client.get_shell_msg(timeout=30)
            if reply["parent_header"].get("msg_id") == cell:
                return reply["content"]
    except Empty:
        raise AssertionError("the kernel does not answer") from None
