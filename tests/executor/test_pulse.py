"""What counts as a sign of life of a rank, and who is silent, by real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from sparkdist.executor import process
from sparkdist.executor.pulse import Pulse
from sparkdist.executor.ranks import Rank
from tests import support

LIMIT = 0.5  # s


@contextmanager
def rank_that_runs(body: Callable[[], object]) -> Iterator[Rank]:
    """A rank in the user's code, which is `body`, and then sleeps."""

    def run() -> None:
        body()
        signal.pause()

    rank = Rank(3)
    rank.fork(run)
    rank.entered = True
    try:
        yield rank
    finally:
        for pid in (rank.pid, *process.descendants(rank.pid)):
            os.kill(pid, signal.SIGKILL)
        rank.reap()
        for fd in (*rank.pipes.theirs, rank.pipes.stdout, rank.pipes.stderr, rank.pipes.events, rank.pidfd):
            os.close(fd)
        os.close(rank.pipes.orders)


def news_within(rank: Rank, seconds: float, disturbed: bool = False) -> list[dict[str, object]]:
    """What is told of a rank that is looked at for so long."""
    news: list[dict[str, object]] = []
    pulse = Pulse(LIMIT, news.append)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pulse.beat([rank], disturbed)
        time.sleep(pulse.pause or 0.01)
    return news


def spin() -> None:
    while True:
        pass


def write_now_and_then(path: Path) -> None:
    while True:
        path.write_text("x")
        time.sleep(0.1)


def have_a_child_that(body: Callable[[], None]) -> None:
    if os.fork() == 0:
        try:
            body()
        finally:
            os._exit(0)


def test_a_rank_that_sleeps_is_silent():
    with rank_that_runs(int) as rank:
        (news,) = news_within(rank, 3 * LIMIT)
        assert (news["kind"], news["rank"]) == ("silent", 3)
        assert LIMIT <= float(str(news["for"])) < 2 * LIMIT
        assert f"process {rank.pid} is asleep" in str(news["state"])
        assert rank.silent and rank.is_fast_asleep()


@pytest.mark.parametrize("where", ["rank", "child"])
def test_a_rank_that_computes_or_writes_a_little_is_not(where: str, tmp_path: Path):
    for body in (spin, partial(write_now_and_then, tmp_path / "file")):
        with rank_that_runs(body if where == "rank" else partial(have_a_child_that, body)) as rank:
            assert news_within(rank, 3 * LIMIT) == []


def test_what_a_child_of_a_stopped_rank_does_does_not_count():
    def stop_beside_a_child() -> None:
        have_a_child_that(spin)
        os.kill(os.getpid(), signal.SIGSTOP)

    with rank_that_runs(stop_beside_a_child) as rank:
        assert support.wait_until(lambda: "is stopped" in process.state(rank.pid), 5)
        (news,) = news_within(rank, 3 * LIMIT)
        assert "is stopped" in str(news["state"])


def test_a_silent_rank_that_goes_on_moves_again():
    reader, writer = os.pipe()

    def spin_when_told() -> None:
        os.read(reader, 1)
        spin()

    with rank_that_runs(spin_when_told) as rank:
        news: list[dict[str, object]] = []
        pulse = Pulse(LIMIT, news.append)

        def told() -> list[object]:
            pulse.beat([rank], disturbed=False)
            return [item["kind"] for item in news]

        assert support.wait_until(lambda: told() == ["silent"], 5)
        assert rank.is_fast_asleep()
        os.write(writer, b"x")
        assert support.wait_until(lambda: told() == ["silent", "moving"], 5)
        assert not rank.silent and not rank.is_fast_asleep()
    os.close(reader)
    os.close(writer)


def test_what_a_rank_writes_when_it_is_asked_is_no_sign_of_life(tmp_path: Path):
    reader, writer = os.pipe()

    def write_when_asked() -> None:
        os.read(reader, 1)
        (tmp_path / "answer").write_text("x" * 1000)

    with rank_that_runs(write_when_asked) as rank:
        news: list[dict[str, object]] = []
        pulse = Pulse(LIMIT, news.append)
        assert support.wait_until(lambda: "is asleep" in process.state(rank.pid), 5)
        asked_at = time.monotonic() + LIMIT / 2
        while time.monotonic() < asked_at:
            pulse.beat([rank], disturbed=False)
        os.write(writer, b"x")
        assert support.wait_until((tmp_path / "answer").exists, 5)
        assert support.wait_until(lambda: "is asleep" in process.state(rank.pid), 5)
        pulse.beat([rank], disturbed=True)
        while not news:
            pulse.beat([rank], disturbed=False)
        assert time.monotonic() - float(str(news[0]["for"])) < asked_at
    os.close(reader)
    os.close(writer)


def test_what_nobody_listened_to_is_no_silence():
    with rank_that_runs(int) as rank:
        assert support.wait_until(lambda: "is asleep" in process.state(rank.pid), 5)
        news: list[dict[str, object]] = []
        pulse = Pulse(LIMIT, news.append)
        pulse.beat([rank], disturbed=False)
        time.sleep(3 * LIMIT)  # as an agent does that is paused with its ranks
        pulse.beat([rank], disturbed=False)
        assert news == []
        while not news:
            pulse.beat([rank], disturbed=False)
        assert float(str(news[0]["for"])) < 2 * LIMIT


def test_nobody_is_looked_at_before_the_function_or_after_it():
    with rank_that_runs(int) as rank:
        rank.entered = False
        assert news_within(rank, 2 * LIMIT) == []
        rank.entered, rank.left = True, {"kind": "returned"}
        assert news_within(rank, 2 * LIMIT) == []


def test_without_a_limit_there_is_nothing_to_wake_up_for():
    assert Pulse(None, print).pause is None
    assert 0 <= (Pulse(100, print).pause or 0) <= 1
