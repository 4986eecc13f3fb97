"""What ranks say to the driver whatever it shows of their lines: `log_to_driver`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sparkdist import Launcher, TrainingFailed
from sparkdist.driver.control import ControlChannel
from sparkdist.rank_context import log_to_driver


def launch(function: Any, *args: Any, **settings: Any) -> Any:
    settings = {"num_processes": 2, "local_mode": True, "timeout": 60, "logs": "none", **settings}
    return Launcher("plain", **settings).launch(function, *args)


def lines_of(rank: int, out: str) -> list[str]:
    prefix = f"[rank {rank}] "
    return [line.removeprefix(prefix) for line in out.splitlines() if line.startswith(prefix)]


def count_up(count: int) -> None:
    for number in range(0, count, 2):
        print(number)
        log_to_driver(str(number + 1))


@pytest.mark.parametrize("local_mode", [True, False], ids=["driver", "spark"])
@pytest.mark.parametrize(("logs", "heard"), [("none", ()), ("rank0", (0,)), ("all", (0, 1))])
def test_messages_come_in_order_with_the_lines_that_are_shown(local_mode, logs, heard, spark, clean, capfd):
    launch(count_up, 400, logs=logs, local_mode=local_mode)
    out = capfd.readouterr().out
    for rank in (0, 1):
        expected = range(400) if rank in heard else range(1, 400, 2)
        assert lines_of(rank, out) == list(map(str, expected))


def test_stderr_too_is_read_before(clean, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # so that there is one order

    def speak():
        for number in range(0, 300, 3):
            print(number, file=sys.stderr)
            log_to_driver(str(number + 1))
            print(number + 2, file=sys.stderr)

    launch(speak, logs="all", num_processes=1)
    assert lines_of(0, capfd.readouterr().out) == list(map(str, range(300)))


def test_a_line_that_has_not_ended_stays_whole(clean, capfd):
    def speak():
        print("loss ", end="", flush=True)
        log_to_driver("a message")
        print("0.5")

    launch(speak, logs="all", num_processes=1)
    assert lines_of(0, capfd.readouterr().out) == ["a message", "loss 0.5"]


def test_any_text(clean, capfd):
    def speak():
        for text in ("é" * 4000 + "x", "\ud800\U0001f600" * 2000 + "x", "\x1b[2J", "two\nlines", ""):
            log_to_driver(text)

    launch(speak, num_processes=1)
    said = lines_of(0, capfd.readouterr().out)
    assert said == ["é" * 4000, "\\ud800\U0001f600" * 2000, "\\x1b[2J", "two", "lines", ""]


def test_what_is_no_string(clean):
    def speak():
        refused = []
        for wrong in (b"bytes", 7, None, ["a"]):
            with pytest.raises(TypeError, match="takes a string") as caught:
                log_to_driver(wrong)  # type: ignore[arg-type]
            refused.append(repr(wrong) in str(caught.value))
        return refused

    assert launch(speak, num_processes=1).values == [[True] * 4]


def test_it_works_in_a_ranks_own_process_only(clean, capfd):
    def elsewhere():
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                log_to_driver("from a child")
            except RuntimeError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        with os.fdopen(reader) as stream:
            return stream.read()

    (said,) = launch(elsewhere, num_processes=1).values
    assert "child of rank 0" in said and "log_to_driver()" in said
    assert capfd.readouterr().out == ""
    with pytest.raises(RuntimeError, match=r"this process is not a rank: log_to_driver\(\)"):
        log_to_driver("from the driver")


@pytest.mark.parametrize("local_mode", [True, False], ids=["driver", "spark"])
def test_they_come_with_the_result_where_the_driver_cannot_be_reached(
    local_mode, spark, clean, capfd, monkeypatch
):
    def refuse(self, header, body):
        raise ConnectionResetError

    monkeypatch.setattr(ControlChannel, "_take", refuse)
    with pytest.warns(UserWarning, match=r"spark\.driver\.host"):
        launch(count_up, 200, local_mode=local_mode)
    out = capfd.readouterr().out
    for rank in (0, 1):
        assert lines_of(rank, out) == list(map(str, range(1, 200, 2)))


@pytest.mark.parametrize("how", [lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_the_last_message_of_a_rank_that_is_gone_at_once(clean, capfd, how: Callable[[], None]):
    def vanish():
        print("printed")
        log_to_driver("said")
        how()

    with pytest.raises(TrainingFailed):
        launch(vanish, num_processes=1, logs="all")
    assert lines_of(0, capfd.readouterr().out) == ["printed", "said"]


def test_threads_and_signal_handlers_that_raise_leave_messages_whole(clean, capfd):
    def busy():
        def expire(*_):
            log_to_driver("expired")
            raise TimeoutError

        def chat(name):
            for _ in range(30):
                log_to_driver(name * 4000)

        signal.signal(signal.SIGALRM, expire)
        threads = [threading.Thread(target=chat, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        expired = 0
        while expired < 20:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003)
                while True:
                    print("printed")
                    log_to_driver("d" * 4000)
            except TimeoutError:
                expired += 1
        for thread in threads:
            thread.join()

    launch(busy, num_processes=1)
    said = lines_of(0, capfd.readouterr().out)
    assert set(said) <= {"expired", *(name * 4000 for name in "abcd")}
    assert [said.count(name * 4000) for name in "abc"] == [30] * 3
    assert said.count("expired") == 20


def test_an_agent_that_is_frozen_holds_up_a_message_but_a_moment(clean, capfd):
    def train():
        import time

        print("before")
        os.kill(os.getppid(), signal.SIGSTOP)
        try:
            print("printed")
            began = time.monotonic()
            log_to_driver("said")
            return time.monotonic() - began
        finally:
            os.kill(os.getppid(), signal.SIGCONT)

    (seconds,) = launch(train, num_processes=1).values
    assert 0.05 < seconds < 2
    assert lines_of(0, capfd.readouterr().out) == ["said"]


def test_a_function_under_torchrun(clean, capfd):
    run = Launcher("torch", num_processes=1, local_mode=True, launcher="torchrun", logs="all")
    run.launch(count_up, 6)
    said = lines_of(0, capfd.readouterr().out)
    assert [line for line in said if line.isdigit()] == list("012345")
