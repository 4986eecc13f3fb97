"""Ranks' lines on the driver: any bytes, any stdout, and a reader that is slow, late or gone."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from sparkdist.driver.console import Console
from sparkdist.driver.lines import Lines
from sparkdist.executor import backlog
from sparkdist.executor.backlog import Backlog, Piece
from tests import support

MB = 1 << 20
DROPPED = re.compile(r"\[rank (\d)\] \.\.\. (\d+) lines dropped")


def printed(data: bytes, rank: int = 0) -> str:
    """What Lines makes of one piece."""
    lines = Lines()
    return lines.text(Piece(rank, False, bytearray(data))) + lines.rest(False)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


# --- what is printed ----------------------------------------------------------------------------


def test_each_line_once_behind_its_rank_on_its_own_stream(capfd):
    with Console() as console:
        console.write(3, False, b"one\n\n  two\n")
        console.write(12, True, b"trouble\n")
        console.write(3, False, b"three\n")
    out, err = capfd.readouterr()
    assert out == "[rank 3] one\n[rank 3] \n[rank 3]   two\n[rank 3] three\n"
    assert err == "[rank 12] trouble\n"


def test_lines_keep_the_order_in_which_they_came(capfd):
    with Console() as console:
        for i in range(3000):
            console.write(i % 3, False, b"%d\n" % i)
    assert capfd.readouterr().out == "".join(f"[rank {i % 3}] {i}\n" for i in range(3000))


@pytest.mark.parametrize(
    "character",
    [
        *map(chr, range(32)),
        *map(chr, range(0x7F, 0xA0)),
        *"\u2028\u2029\u202e\u2066\u200f\u061c\ufeff\ue000\U000e0041",
    ],
    ids=ascii,
)
def test_what_would_steer_a_terminal_is_shown_instead(character):
    if character in "\n\t\r":
        return  # these mean something; see below
    said = printed(f"before{character}after\nnext\n".encode())
    assert said == f"[rank 0] before{character.encode('unicode_escape').decode()}after\n[rank 0] next\n"
    assert all(line.isprintable() for line in said.split("\n"))


def test_what_is_no_utf_8_is_shown_as_its_bytes():
    said = printed(b"\xff\xfe \xed\xa0\x80 caf\xc3 \x1b[31mred\x1b[0m\x00\n")
    assert said == "[rank 0] \\xff\\xfe \\xed\\xa0\\x80 caf\\xc3 \\x1b[31mred\\x1b[0m\\x00\n"


@pytest.mark.parametrize(
    "text", ["a\tb", "漢字　かな", "10\u00a0000\u202f€", "שלום", "🤗 ❤️", "e\u0301", "x" * MB]
)
def test_what_can_be_shown_stays(text):
    assert printed(f"{text}\n".encode()) == f"[rank 0] {text}\n"


# --- carriage returns ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"line\r\nnext\r\n\r\n", ["line", "next", ""]),
        (b" 10%\r 50%\r100%\ndone\n", ["100%", "done"]),
        (b"\r 10%\r 50%\n", [" 50%"]),
        (b"\r100%\r    \rdone\n", ["done"]),
        (b"\r\r\n", [""]),
        (b"99%\r", ["99%"]),
    ],
)
def test_of_a_line_drawn_over_and_over_the_last_state_is_shown(said, shown):
    assert printed(said) == "".join(f"[rank 0] {line}\n" for line in shown)


def test_a_progress_bar_is_live_and_no_flood():
    lines = Lines()
    began, told, count = time.monotonic(), "", 0
    while time.monotonic() - began < 1.2:
        count += 1
        told += lines.text(Piece(1, True, bytearray(b"step %d\r" % count)))
        time.sleep(0.001)
    told += lines.text(Piece(1, True, bytearray(b"\nbye\n")))
    steps = told.splitlines()
    assert steps[0] == "[rank 1] step 1" and steps[-2:] == [f"[rank 1] step {count}", "[rank 1] bye"]
    assert 4 <= len(steps) <= 6 and count > 50


def test_a_bar_that_has_been_shown_is_not_shown_again_at_its_end():
    lines = Lines()
    pieces = [b"100%\r", b"\n", b"next\n"]
    told = "".join(lines.text(Piece(0, False, bytearray(data))) for data in pieces)
    assert told == "[rank 0] 100%\n[rank 0] next\n"


# --- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", r"\u6f22 caf\xe9"), ("latin-1", r"\u6f22 café"), ("utf-8", "漢 café")],
)
def test_what_the_encoding_of_stdout_lacks_is_escaped(tmp_path, monkeypatch, encoding, shown):
    path = tmp_path / "out"
    with path.open("w", encoding=encoding) as file, Console() as console:
        monkeypatch.setattr(sys, "stdout", file)
        console.write(0, False, "漢 café\n".encode())
        console.__exit__()
    assert path.read_text(encoding=encoding) == f"[rank 0] {shown}\n"


def test_an_encoding_is_met_by_streams_in_memory_too(monkeypatch):
    memory = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(memory, encoding="ascii"))
    with Console() as console:
        console.write(0, False, "é\n".encode())
    assert memory.getvalue() == b"[rank 0] \\xe9\n"


class Raises:
    """A stdout that somebody made."""

    def write(self, text: str) -> int:
        raise RuntimeError(text)


def broken_pipe() -> IO[str]:
    read, write = os.pipe()
    os.close(read)
    return open(write, "w", closefd=True)


def closed_file() -> IO[str]:
    with open(os.devnull, "w") as file:
        return file


@pytest.mark.parametrize("make", [broken_pipe, closed_file, Raises, lambda: None, object], ids=repr)
def test_a_stdout_that_takes_nothing_costs_its_lines_only(capfd, make):
    stream = make()
    with Console() as console:
        with contextlib.redirect_stdout(stream):
            console.write(0, False, b"lost\n")
            assert support.wait_until(lambda: console._outlet.moves == 1, 5)
        console.write(0, False, b"stays\n")
        console.write(0, True, b"stays, too\n")
    assert capfd.readouterr() == ("[rank 0] stays\n", "[rank 0] stays, too\n")
    if isinstance(stream, io.TextIOWrapper):
        stream.close()  # nothing of ours is left in it that could not be written


def test_a_stdout_replaced_during_the_run(capfd):
    with Console() as console:
        with contextlib.redirect_stdout(io.StringIO()) as replaced:
            console.write(0, False, b"to the notebook\n")
            assert support.wait_until(lambda: replaced.getvalue() != "", 5)
        console.write(0, False, b"to the terminal\n")
    assert replaced.getvalue() == "[rank 0] to the notebook\n"
    assert capfd.readouterr().out == "[rank 0] to the terminal\n"


def test_what_others_had_written_before_comes_before(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        print("the driver's own")
        with Console() as console:
            console.write(0, False, b"a rank's\n")
    assert (tmp_path / "out").read_text() == "the driver's own\n[rank 0] a rank's\n"


class Pipe(contextlib.AbstractContextManager["Pipe"]):
    """A stdout, as long as it is entered, whose reader is the test."""

    def __init__(self) -> None:
        self.read_fd, write = os.pipe()
        self.stream = open(write, "w")
        self._redirection = contextlib.redirect_stdout(self.stream)

    def __enter__(self) -> Pipe:
        self._redirection.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._redirection.__exit__(None, None, None)
        self.stream.close()

    def read(self, pause: float = 0.0) -> str:
        """Reads until the stream is closed."""
        parts = []
        while data := os.read(self.read_fd, 1 << 16):
            parts.append(data)
            time.sleep(pause)
        return b"".join(parts).decode()

    def reader(self, pause: float = 0.0) -> tuple[threading.Thread, list[str]]:
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(self.read(pause)))
        thread.start()
        return thread, texts


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.stream.close()
    os.close(pipe.read_fd)


def test_lines_are_live(pipe):
    with pipe, Console() as console:
        for i in range(20):
            sent = time.monotonic()
            console.write(0, False, b"%d\n" % i)
            assert os.read(pipe.read_fd, 100) == b"[rank 0] %d\n" % i
            assert time.monotonic() - sent < 0.5


def test_a_stdout_that_does_not_block_gets_every_line(pipe):
    os.set_blocking(pipe.stream.fileno(), False)
    reader, texts = pipe.reader(pause=0.005)
    with pipe, Console() as console:
        for i in range(20000):
            console.write(0, False, b"line %06d\n" % i)
    reader.join()
    assert texts[0] == "".join(f"[rank 0] line {i:06}\n" for i in range(20000))


def test_a_slow_reader_gets_every_line_however_long_it_takes(pipe):
    reader, texts = pipe.reader(pause=0.2)
    with pipe, Console() as console:
        for i in range(1500):
            console.write(0, False, b"%06d %s\n" % (i, b"." * 1000))
    reader.join()
    assert texts[0].splitlines() == [f"[rank 0] {i:06} {'.' * 1000}" for i in range(1500)]


# --- nobody reads -------------------------------------------------------------------------------

LINE = b"%08d " + b"x" * 90 + b"\n"


def write_lines(console: Console, rank: int, size: int) -> int:
    """Has about so many bytes of numbered lines printed; returns how many lines."""
    count = size // len(LINE % 0)
    for first in range(0, count, 500):
        console.write(rank, False, b"".join(LINE % i for i in range(first, min(first + 500, count))))
    return count


def numbers(text: str, rank: int) -> list[int]:
    return [int(number) for number in re.findall(rf"^\[rank {rank}\] (\d{{8}}) x{{90}}$", text, re.M)]


def test_past_16_mib_the_oldest_lines_of_that_rank_drop_and_are_counted(pipe):
    with pipe, Console() as console:
        began = time.monotonic()
        counts = [write_lines(console, 0, 40 * MB), write_lines(console, 1, 4 * MB)]
        assert time.monotonic() - began < 10  # though nobody has read a thing
        reader, texts = pipe.reader()
    reader.join()
    dropped = {int(rank): int(count) for rank, count in DROPPED.findall(texts[0])}
    assert set(dropped) == {0}
    for rank, count in enumerate(counts):
        found = numbers(texts[0], rank)
        assert found == sorted(set(found)) and found[-1] == count - 1
        assert len(found) + dropped.get(rank, 0) == count
    assert 15 * MB < len(numbers(texts[0], 0)) * len(LINE % 0) < 17 * MB
    # The count stands where the lines are missing.
    before, after = DROPPED.split(texts[0])[0], texts[0].partition(" lines dropped")[2]
    assert max(numbers(before, 0)) + dropped[0] + 1 == min(numbers(after, 0))
    assert set(texts[0].splitlines()) - {line for line in texts[0].splitlines() if " xxx" in line} == {
        f"[rank 0] ... {dropped[0]} lines dropped: the driver's output is read too slowly"
    }


def test_one_rank_that_floods_costs_no_other_a_line(pipe):
    with pipe, Console() as console:
        for i in range(20):
            write_lines(console, 0, 2 * MB)
            console.write(1, i % 2 == 1, LINE % i)
        reader, texts = pipe.reader()
    reader.join()
    assert numbers(texts[0], 1) == list(range(0, 20, 2))


def test_lines_that_were_dropped_are_told_of_where_nothing_follows():
    waiting = Backlog()
    waiting.add(0, True, b"one\ntwo\n")
    waiting.add(0, False, b"x" * backlog.LIMIT + b"\nlast\n")
    assert [(p.is_stderr, p.data, p.dropped) for p in waiting.take(1)] == [(False, bytearray(b"last\n"), 1)]
    assert [(p.is_stderr, p.data, p.dropped) for p in waiting.take_dropped()] == [(True, bytearray(), 2)]
    assert waiting.lines() == 0 and not waiting


def test_many_short_lines_of_many_ranks_take_no_more_memory_than_long_ones():
    waiting = Backlog()
    for i in range(300_000):
        waiting.add(i % 2, i % 4 < 2, b"\n")
    taken = waiting.take(1 << 40)
    assert len(taken) * sys.getsizeof(taken[0].data) < 2 * backlog.LIMIT
    assert len(taken) + sum(piece.dropped for piece in taken) == 300_000


def test_the_end_does_not_wait_for_a_reader_that_there_is_not(pipe, capfd):
    with pipe, Console() as console:
        count = write_lines(console, 0, 4 * MB)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    left = re.fullmatch(r"sparkdist: (\d+) lines of the ranks were not printed: .*\n", capfd.readouterr().err)
    assert left and len(numbers(pipe.read(), 0)) + int(left[1]) == count


def test_a_stream_that_never_returns_keeps_nothing_but_its_own_daemon():
    blocked, release = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            blocked.set()
            release.wait()
            return len(text)

    with contextlib.redirect_stdout(Stuck()), Console() as console:
        console.write(0, False, b"a line\n")
        assert blocked.wait(5)
        began = time.monotonic()
    assert time.monotonic() - began < 6
    assert console._thread.daemon and console._thread.is_alive()
    release.set()
    console._thread.join(5)


# --- runs ---------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
from pathlib import Path
from sparkdist import Launcher, TrainingFailed, context

folder = Path(sys.argv[1])

def fill(folder, size, wait):
    rank = context().rank
    for first in range(0, size // 100, 1000):
        sys.stdout.write("".join(f"{i:08} {'x' * 90}\\n" for i in range(first, first + 1000)))
    sys.stdout.flush()
    (folder / f"printed-{rank}").touch()
    while wait and not (folder / "go on").exists():
        time.sleep(0.02)
    if not wait and rank == 1:
        raise ValueError("of rank 1")
    while not wait:
        print("and on and on", flush=True)
    return rank

try:
    wait = sys.argv[2] == "wait"
    values = Launcher("plain", num_processes=2, local_mode=True).launch(fill, folder, 32 << 20, wait).values
    (folder / "ended").write_text(repr(values))
except TrainingFailed as error:
    (folder / "ended").write_text(error.failures[1].message)
"""


@pytest.fixture
def run_blocked(tmp_path: Path, clean: None) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    processes = []

    def start(how: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
        pipe, folder = subprocess.PIPE, Path(__file__).parents[2]
        processes.append(subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_ranks_print_on_though_nobody_reads_and_what_dropped_is_counted(run_blocked, tmp_path):
    driver = run_blocked("wait")
    assert support.wait_until(lambda: all((tmp_path / f"printed-{rank}").exists() for rank in (0, 1)), 60)
    threading.Timer(1, (tmp_path / "go on").touch).start()  # when the driver's output is read again
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 0 and err == b""
    assert (tmp_path / "ended").read_text() == "[0, 1]"
    dropped: Counter[int] = Counter()  # the agent may drop some as well, and earlier
    for rank, count in DROPPED.findall(out.decode()):
        dropped[int(rank)] += int(count)
    for rank in (0, 1):
        assert dropped[rank] + len(numbers(out.decode(), rank)) == (32 << 20) // 100 // 1000 * 1000 + 1000


def test_a_failure_is_heard_though_nobody_reads(run_blocked, tmp_path):
    driver = run_blocked("fail")
    assert support.wait_until((tmp_path / "printed-1").exists, 60)
    assert support.wait_until((tmp_path / "ended").exists, 15)
    assert "of rank 1" in (tmp_path / "ended").read_text()
    assert driver.wait(timeout=10) == 0  # it has not even to be read to end
