"""Every line of every rank reaches the driver live, once, behind its rank."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest

from tests.faults import programs
from tests.faults.ways import Way

LIVE = 1.0  # s from a rank's print to the driver's


class Arrivals(io.TextIOBase):
    """A stream that notes when it gets what."""

    def __init__(self) -> None:
        self.text: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.text.append((time.time(), text))
        return len(text)

    def lines(self) -> list[tuple[float, int, str, float]]:
        """Ranks' lines: when each came, its rank, its label, and when it was printed."""
        found = []
        for came, text in self.text:
            for line in re.finditer(r"^\[rank (\d+)\] (.*) at (\d+\.\d+)$", text, re.MULTILINE):
                found.append((came, int(line[1]), line[2], float(line[3])))
        return found


LINES = 5
SAY = f"""
import sys, time
for i in range({LINES}):
    for name in ("stdout", "stderr"):
        print(f"{{name}} {{i}} at {{time.time():.6f}}", file=getattr(sys, name))
    time.sleep(0.2)
"""


def say() -> None:
    exec(SAY, {})


@pytest.mark.parametrize("what", ["function", "script"])
def test_lines_come_live(either: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    script = tmp_path / "say.py"
    script.write_text(SAY)
    out, err = Arrivals(), Arrivals()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        either.launch(say if what == "function" else script)
    for stream, name in ((out, "stdout"), (err, "stderr")):
        lines = stream.lines()
        for rank in range(either.ranks):
            labels = [label for _, of, label, _ in lines if of == rank]
            assert labels == [f"{name} {i}" for i in range(LINES)]
        assert len(lines) == LINES * either.ranks
        late = [came - printed for came, _, _, printed in lines]
        assert max(late) < LIVE, late


@pytest.mark.slow
@pytest.mark.parametrize(("logs", "shown"), [("rank0", [0]), ("none", [])])
def test_whose_lines_are_printed(way: Way, capfd: pytest.CaptureFixture[str], logs: str, shown: list[int]):
    way.launch(programs.print_lines, 10, 1e9, logs=logs)
    said = capfd.readouterr()
    ranks = {int(rank) for rank in re.findall(r"^\[rank (\d+)\] 0000", said.out + said.err, re.MULTILINE)}
    assert ranks == set(shown)


@pytest.mark.slow
def test_as_much_as_ranks_can_print_does_not_stop_them(way: Way, capfd: pytest.CaptureFixture[str]):
    way.launch(programs.print_lines, 50_000, 1e9)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank ")]
    assert {int(line[6]) for line in lines} == set(range(way.ranks))
    assert all(len(line) == 9 + 99 or "dropped" in line for line in lines)


def test_reports_of_every_executor(way: Way):
    results = way.launch(programs.report, 3)
    told = sorted((report.rank, report.step) for report in results.metrics)
    assert told == [(rank, step) for rank in range(way.ranks) for step in range(3)]
