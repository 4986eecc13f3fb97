"""More output than anybody can read: a gigabyte of lines, and a line that does not end."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.faults import programs
from tests.faults.ways import Way

BOUND = 120 << 10  # kB; each rank's lines that wait are bounded by 16 MB, in the agent and in the driver


class Reader(io.TextIOBase):
    """Counts what the driver prints of rank 1, and keeps nothing."""

    def __init__(self) -> None:
        self.lines = self.characters = self.dropped = 0
        self.longest = 0

    def write(self, text: str) -> int:
        for line in text.splitlines():
            said = line.removeprefix("[rank 1] ")
            if found := re.match(r"\.\.\. (\d+) lines dropped", said):
                self.dropped += int(found[1])
            elif said != line:
                self.lines += 1
                self.characters += len(said)
                self.longest = max(self.longest, len(said))
        return len(text)


def own_growth(before: int) -> int:
    """How far above what it was the peak of this process's memory has been since (kB)."""
    return programs.memory()[1] - before


def remember() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    return programs.memory()[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gigabyte_of_lines(fast: Way):
    blocks = (1 << 30) // len(programs.BLOCK) + 1
    fast.launch(programs.rank)
    before = remember()
    with redirect_stdout(reader := Reader()):
        _, (seconds, agents, peak) = fast.launch(programs.shout, blocks, timeout=200).values
    assert own_growth(before) < BOUND
    assert peak - agents < BOUND
    assert seconds < 120  # nobody waits for the reader
    assert reader.lines + reader.dropped == blocks * 640


def test_a_line_of_100_megabytes(fast: Way):
    fast.launch(programs.rank)
    before = remember()
    with redirect_stdout(reader := Reader()):
        agents = min(fast.launch(programs.print_without_end, 0).values)
        peak = fast.launch(programs.print_without_end, 100).values[1]
    assert own_growth(before) < BOUND
    assert peak - agents < BOUND
    assert reader.longest == 1 << 16
    assert reader.lines + reader.dropped - 1 == (100 << 20) // (1 << 16)  # the one: of the line of no length
    assert reader.characters == (reader.lines - 1) * (1 << 16)
