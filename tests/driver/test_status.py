"""The status line: on real terminals, in a real notebook, and nowhere else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from sparkdist import Launcher
from sparkdist.driver.board import Board
from sparkdist.driver.console import Console
from sparkdist.driver.outlet import Outlet
from sparkdist.driver.status import Status, phase_of
from tests import orders, support

ROOT = Path(__file__).parents[2]
ERASE = "\r\x1b[K"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")

# Ranks start when there is a file "start", and end when there is a file "end".
PROGRAM = """
import sys, time
from pathlib import Path
from sparkdist import Launcher, TrainingFailed, context, report

folder, how = Path(sys.argv[1]), sys.argv[2]
status = {"None": None, "True": True, "False": False}[sys.argv[3]]

def wait_for(path):
    while not path.exists():
        time.sleep(0.02)

class Gate:
    def __init__(self, path): self.path = path
    def __reduce__(self): return wait_for, (self.path,)

def train(gate):
    rank, count = context().rank, 0
    print("begins", file=sys.stderr, flush=True)
    while not (folder / "end").exists():
        print(f"step {count:04} of {rank}", flush=True)
        if how == "raise":
            report({"loss": 0.5}, step=count)
        count += 1
        time.sleep(0.1)
    if how == "raise" and rank == 1:
        raise ValueError("of rank 1")
    return count

print("before")
try:
    counts = Launcher("plain", num_processes=2, local_mode=True, status=status).launch(
        train, Gate(folder / "start")).values
    print("counts", *counts)
except (TrainingFailed, KeyboardInterrupt) as error:
    print("ended by", type(error).__name__)
"""


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end, of what is not wider than it."""
    lines, column = [""], 0
    for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
            column += len(part)
    return lines


class Terminal:
    """A terminal; all that was written to it is in `text`."""

    def __init__(self, columns: int) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.text += os.read(self._master, 1 << 16).decode()
            except OSError:
                return  # nobody has the other end any more

    def shows(self, text: str, seconds: float = 30) -> bool:
        return support.wait_until(lambda: text in self.text, seconds)

    def hang_up(self) -> None:
        """Closes this process's end, and waits until all has been read."""
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1
            self._reader.join()
            os.close(self._master)


@pytest.fixture
def open_terminal(clean: None) -> Iterator[Callable[..., Terminal]]:
    opened = []

    def make(columns: int = 80) -> Terminal:
        opened.append(Terminal(columns))
        return opened[-1]

    yield make
    for terminal in opened:
        terminal.hang_up()


@pytest.fixture
def start(tmp_path: Path, clean: None) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts PROGRAM."""
    started = []

    def start(how: str = "", status: bool | None = None, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), how, str(status)]
        env = {**os.environ, "TERM": "xterm", **options.pop("env", {})}
        process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def on(terminal: Terminal) -> dict[str, int]:
    return {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}


# --- terminals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["return", "raise", "interrupt"])
def test_phases_are_seen_and_are_gone_when_the_run_ends(start, open_terminal, tmp_path, how):
    terminal = open_terminal()
    process = start(how, **on(terminal))
    assert terminal.shows("sparkdist: starting 2 ranks")
    (tmp_path / "start").touch()
    assert terminal.shows("sparkdist: running 00:01")
    if how == "raise":
        assert terminal.shows(", loss=0.5\r")
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        (tmp_path / "end").touch()
    assert process.wait(timeout=30) == 0
    terminal.hang_up()
    lines = screen(terminal.text)
    assert not any("sparkdist:" in line or "\x1b" in line for line in lines), lines
    assert lines[0] == "before" and lines[-1] == ""
    assert sorted(lines).count("[rank 0] begins") == sorted(lines).count("[rank 1] begins") == 1
    steps = {rank: [line for line in lines if line.endswith(f"of {rank}")] for rank in (0, 1)}
    for rank, found in steps.items():
        assert found == [f"[rank {rank}] step {i:04} of {rank}" for i in range(len(found))]
    if how == "return":
        assert lines[-2] == f"counts {len(steps[0])} {len(steps[1])}"
    else:
        assert lines[-2] == f"ended by {'TrainingFailed' if how == 'raise' else 'KeyboardInterrupt'}"
    # Nothing else is on those lines, so all of them are known.
    assert len(lines) == 5 + len(steps[0]) + len(steps[1])


def test_it_fits_its_terminal(start, open_terminal, tmp_path):
    terminal = open_terminal(columns=20)
    process = start(**on(terminal))
    assert terminal.shows(f"{ERASE}sparkdist: starting\r")
    (tmp_path / "start").touch()
    assert terminal.shows(f"{ERASE}sparkdist: running \r")
    (tmp_path / "end").touch()
    assert process.wait(timeout=30) == 0


def test_a_terminal_that_does_not_tell_its_width(start, open_terminal, tmp_path):
    terminal = open_terminal(columns=0)
    process = start(**on(terminal))
    (tmp_path / "start").touch()
    assert terminal.shows(f"{ERASE}sparkdist: running 00:00\r")
    (tmp_path / "end").touch()
    assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("status", "env"),
    [(False, {}), (None, {"TERM": "dumb"}), (None, {"TERM": ""})],
    ids=["off", "dumb", "none"],
)
def test_terminals_without_it(start, open_terminal, tmp_path, status, env):
    terminal = open_terminal()
    process = start(status=status, env=env, **on(terminal))
    (tmp_path / "start").touch()
    assert terminal.shows("step 0015 of 1")
    (tmp_path / "end").touch()
    assert process.wait(timeout=30) == 0
    terminal.hang_up()
    assert "sparkdist:" not in terminal.text and not CONTROL.search(terminal.text.replace("\r\n", "\n"))


def test_a_stderr_that_is_a_file_beside_a_terminal(start, open_terminal, tmp_path):
    terminal = open_terminal()
    with (tmp_path / "err").open("w") as err:
        process = start(**{**on(terminal), "stderr": err})
    (tmp_path / "start").touch()
    assert terminal.shows("step 0015 of 1")
    (tmp_path / "end").touch()
    assert process.wait(timeout=30) == 0
    terminal.hang_up()
    assert "sparkdist:" not in terminal.text
    assert sorted((tmp_path / "err").read_text().splitlines()) == ["[rank 0] begins", "[rank 1] begins"]


# --- files and pipes ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [None, False, True])
def test_a_plain_file(start, tmp_path, status):
    (tmp_path / "start").touch()
    log = tmp_path / "log"
    with log.open("w") as file:
        process = start(status=status, stdout=file, stderr=file)
    assert support.wait_until(lambda: "step 0015 of 1" in log.read_text(), 30)
    (tmp_path / "end").touch()
    assert process.wait(timeout=30) == 0
    assert not CONTROL.search(log.read_text())
    said = [line for line in log.read_text().splitlines() if "sparkdist:" in line]
    if status:  # one line for each phase
        assert said[-1] == "sparkdist: running" and len(said) == len(set(said))
    else:
        assert said == []


# --- Spark --------------------------------------------------------------------------------------


def test_a_run_that_waits_for_slots(spark, open_terminal, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    gate = str(tmp_path / "gate")

    def hold(_: object) -> None:
        deadline = time.monotonic() + 60
        while not os.path.exists(gate) and time.monotonic() < deadline:
            time.sleep(0.02)

    terminal = open_terminal()

    def open_gate() -> None:
        if terminal.shows("sparkdist: waiting for 2 slots"):
            Path(gate).touch()

    held = threading.Thread(target=lambda: spark.sparkContext.parallelize(range(2), 2).foreach(hold))
    held.start()
    tracker = spark.sparkContext.statusTracker()
    assert support.wait_until(lambda: bool(tracker.getActiveStageIds()), 30)
    with (
        open(terminal.slave, "w", closefd=False) as stderr,
        contextlib.redirect_stderr(stderr),
    ):
        seen = threading.Thread(target=open_gate)
        seen.start()
        values = Launcher("plain", num_processes=2, spark=spark).launch(time.sleep, 1.5).values
    seen.join()
    held.join()
    terminal.hang_up()
    assert values == [None, None] and "sparkdist: running 00:0" in terminal.text
    assert screen(terminal.text) == [""]


# --- a notebook ---------------------------------------------------------------------------------

CELL = """
import sys, time
sys.path.insert(0, {root!r})
from sparkdist import Launcher
print("before")
value = Launcher("plain", num_processes=2, local_mode=True).run({function})
print("after")
"""


@pytest.mark.parametrize(
    ("function", "allowed"),
    [("time.sleep, 2.2", ["before\n", "after\n"]), ("lambda: (time.sleep(2.2), 1 / 0)", ["before\n"])],
    ids=["returns", "raises"],
)
def test_a_notebook_shows_it_and_keeps_nothing_of_it(function, allowed):
    source = CELL.format(root=str(ROOT), function=function)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    said = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, index: int) -> Any:
            if msg["msg_type"] in ("display_data", "update_display_data"):
                said.append(msg["content"]["data"])
            return super().process_message(msg, cell, index)

    Client(notebook, timeout=60, allow_errors=True).execute()
    nbformat.validate(notebook)
    assert {"text/plain": "sparkdist: running 00:01"} in said and said[-1] == {}
    outputs = notebook.cells[0].outputs
    assert "sparkdist:" not in str([output for output in outputs if output.output_type != "error"])
    assert "".join(o.text for o in outputs if o.output_type == "stream") == "".join(allowed)
    assert [o.data for o in outputs if o.output_type == "display_data"] == [{}]


# --- words --------------------------------------------------------------------------------------


def test_phases():
    board, now = Board(), time.monotonic()

    def words(size: int = 8) -> str:
        return phase_of(orders.plain(size), board, lambda: "still waiting for 8 slots")[0]

    assert words() == "waiting for 8 slots"
    board.nodes[0] = now
    assert words() == "starting 8 ranks" and words(1) == "starting 1 rank"
    board.nodes[1] = now
    assert words() == "starting 8 ranks on 2 executors"
    board.entered |= dict.fromkeys(range(5), now)
    assert words() == "starting 8 ranks on 2 executors (5 ready)"
    board.entered |= dict.fromkeys(range(5, 8), now + 1)
    assert phase_of(orders.plain(8), board, lambda: "") == ("running", now + 1)
    board.failed.append(3)
    assert words() == "rank 3 failed, ending the others"


def said(phase: Callable[[], Any], terminal: Terminal, monkeypatch, **options: Any) -> str:
    """What a terminal is told of a phase."""
    monkeypatch.setenv("TERM", "xterm")
    with open(terminal.slave, "w", closefd=False) as stderr, contextlib.redirect_stderr(stderr):
        status = Status(None, phase, **options)
        status._first = 0.0
        status.draw(Outlet())
        status.end(Outlet())
    terminal.hang_up()
    return terminal.text.removesuffix(ERASE)


@pytest.mark.parametrize(
    ("age", "clock"), [(0, "00:00"), (192.5, "03:12"), (3599, "59:59"), (3600, "1:00:00"), (1e6, "277:46:40")]
)
def test_the_clock(open_terminal, monkeypatch, age, clock):
    since = time.monotonic() - age
    assert (
        said(lambda: ("running", since), open_terminal(), monkeypatch)
        == f"{ERASE}sparkdist: running {clock}\r"
    )


@pytest.mark.parametrize(
    ("attempt", "tail"), [((1, 1), ""), ((1, 4), ", attempt 1 of 4"), ((2, 4), ", attempt 2 of 4")]
)
def test_attempts(open_terminal, monkeypatch, attempt, tail):
    text = said(lambda: ("waiting for 2 slots", None), open_terminal(), monkeypatch, attempt=attempt)
    assert text == f"{ERASE}sparkdist: waiting for 2 slots{tail}\r"


@pytest.mark.parametrize("since", [None, 0.0])
def test_progress_is_told_of_the_training_only(open_terminal, monkeypatch, since):
    start = since if since is None else time.monotonic() - 65
    options = {"attempt": (2, 4), "progress": lambda: "step 120, loss=0.123"}
    text = said(lambda: ("running", start), open_terminal(), monkeypatch, **options)
    clock, progress = ("", "") if since is None else (" 01:05", ", step 120, loss=0.123")
    assert text == f"{ERASE}sparkdist: running{clock}, attempt 2 of 4{progress}\r"


def test_a_phase_that_cannot_be_told_ends_the_status_only(open_terminal, monkeypatch, capfd):
    assert said(lambda: 1 / 0, open_terminal(), monkeypatch) == ""


def test_a_short_run_does_not_flicker(open_terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = open_terminal()
    with (
        open(terminal.slave, "w", closefd=False) as stderr,
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(stderr),
        Console() as console,
    ):
        console.show(Status(None, lambda: ("running", None)))
        console.write(0, False, b"a line\n")
    terminal.hang_up()
    assert terminal.text == "[rank 0] a line\r\n"


@pytest.mark.parametrize("second", [None, False], ids=["both", "one"])
def test_runs_at_once_share_one_line(open_terminal, monkeypatch, second):
    monkeypatch.setenv("TERM", "xterm")
    terminal = open_terminal()

    def write(console: Console, rank: int) -> None:
        for i in range(300):
            console.write(rank, rank == 0, b"%d\n" % i)
            time.sleep(0.002)

    with (
        open(terminal.slave, "w", closefd=False) as stderr,
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(stderr),
        Console() as one,
        Console() as other,
    ):
        one.show(Status(None, lambda: ("first, which is longer than the lines", None)))
        assert terminal.shows("sparkdist: first", 5)
        other.show(Status(second, lambda: ("second, which is longer than the lines", None)))
        writers = [threading.Thread(target=write, args=args) for args in ((one, 0), (other, 1))]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        one.__exit__()
        assert second is False or terminal.shows("sparkdist: second", 5)  # it has the line now
    terminal.hang_up()
    *lines, last = screen(terminal.text)
    assert sorted(lines) == sorted(f"[rank {rank}] {i}" for rank in (0, 1) for i in range(300)) and last == ""


def test_a_terminal_that_hangs_up_in_the_middle(open_terminal, monkeypatch, capfd):
    monkeypatch.setenv("TERM", "xterm")
    terminal = open_terminal()
    stderr = os.fdopen(os.dup(terminal.slave), "w")
    with Console() as console:
        with contextlib.redirect_stderr(stderr):
            console.show(Status(None, lambda: ("running", None)))
            assert terminal.shows("sparkdist: running", 5)
        stderr.close()
        console.write(0, False, b"a line\n")
        console.write(0, True, b"another\n")
    assert capfd.readouterr() == ("[rank 0] a line\n", "[rank 0] another\n")
