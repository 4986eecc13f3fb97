"""What benchmarks share: workers that time one thing, the machine's header, the table of ratios.

A benchmark file runs itself as its workers: a worker is a fresh Python process that prepares one
subject (a session, say), then runs it once for each line on its stdin and answers with a line of
JSON. The parent decides whose turn it is, so that ours and the peers alternate and a machine that
slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Figures = dict[str, float]  # what one run measured, by name: "seconds" and what the subject adds
Samples = dict[str, list[Figures]]  # by subject
Commands = Mapping[str, Sequence[str]]  # by subject: what starts its worker

_ANSWER = '{"seconds": '


# --- in a worker --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        text: What it runs, for the report.
        prepare: Makes ready (a session, say) and returns what is timed, which may return further
            figures.
    """

    text: str
    prepare: Callable[[], Callable[[], Figures | None]]


def serve(run: Callable[[], Figures | None]) -> None:
    """Runs and times `run` for each line on stdin, until stdin ends."""
    for _ in sys.stdin:
        started = time.perf_counter()
        figures = run()
        seconds = time.perf_counter() - started
        # On a line of its own, whatever a log printed before.
        print("\n" + json.dumps({"seconds": seconds, **(figures or {})}), flush=True)


# --- in the parent ------------------------------------------------------------------------------


@contextmanager
def worker(command: Sequence[str]) -> Iterator[Callable[[], Figures]]:
    """Starts a worker and yields a function that has it run once and returns the figures."""
    with tempfile.TemporaryFile("w+") as errors:
        # The output's text is not ours alone: logs of the subject come along.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def measure() -> Figures:
            assert process.stdin is not None
            assert process.stdout is not None
            seen: list[str] = []
            try:
                process.stdin.write("\n")
                process.stdin.flush()
                for line in process.stdout:
                    if line.startswith(_ANSWER):
                        return {name: float(value) for name, value in json.loads(line).items()}
                    seen.append(line)
            except BrokenPipeError:
                pass  # it ended before it was asked: what it said explains why
            errors.seek(0)
            text = "".join([*seen, errors.read()])[-4000:]
            raise RuntimeError(f"{' '.join(command)} ended with code {process.wait()}:\n{text}")

        try:
            yield measure
        finally:
            # The end of its stdin tells it to go; waiting keeps it out of the next one's time.
            process.communicate()


def fresh(commands: Commands, repeats: int) -> Samples:
    """Measures the first run of a new worker, `repeats` times for each command, in turn."""
    samples: Samples = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            with worker(command) as measure:
                samples[name].append(measure())
            _progress(name, samples)
    return samples


def warm(ours: str, peer: str, commands: Commands, repeats: int) -> Samples:
    """Measures the second and later runs of one worker each for ours and the peer, in turn."""
    samples: Samples = {ours: [], peer: []}
    with worker(commands[ours]) as run_ours, worker(commands[peer]) as run_peer:
        run_ours()
        run_peer()
        for _ in range(repeats):
            for name, measure in ((ours, run_ours), (peer, run_peer)):
                samples[name].append(measure())
                _progress(name, samples)
    return samples


def _progress(name: str, samples: Samples) -> None:
    count, last = len(samples[name]), samples[name][-1]
    text = ", ".join(f"{figure} {value:.4g}" for figure, value in last.items())
    print(f"  {name}, run {count}: {text}", file=sys.stderr, flush=True)


# --- the report ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: the medians' ratio, ours to the peer's, must not be over the limit."""

    case: str
    peer: str
    ours: list[float]
    theirs: list[float]
    limit: float
    unit: str = "s"

    @classmethod
    def of(
        cls,
        case: str,
        samples: Samples,
        ours: str,
        peer: str,
        limit: float,
        figure: str = "seconds",
        unit: str = "s",
    ) -> Row:
        """Makes a row of one figure of two subjects."""
        found, theirs = ([run[figure] for run in samples[name]] for name in (ours, peer))
        return cls(case=case, peer=peer, ours=found, theirs=theirs, limit=limit, unit=unit)

    @property
    def ratio(self) -> float:
        """Our median over the peer's."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def holds(self) -> bool:
        """Whether the ratio is within the limit."""
        return self.ratio <= self.limit


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table; figures are medians (least - most)."""
    lines = [
        "| case | ours | peer | peer's | ratio | limit | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row.case,
            spread(row.ours, row.unit),
            row.peer,
            spread(row.theirs, row.unit),
            f"{row.ratio:.3f}",
            f"{row.limit:g}",
            "yes" if row.holds else "**no**",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(samples: Sequence[float], unit: str) -> str:
    """Returns samples as "median unit (least - most)"; of one sample there is no more to say."""
    digits = ".3f" if unit == "s" else ".4g"
    median = f"{statistics.median(samples):{digits}} {unit}"
    return median if len(samples) == 1 else f"{median} ({min(samples):{digits}} - {max(samples):{digits}})"


def machine(packages: Sequence[str]) -> dict[str, str]:
    """Returns what a reader needs to judge the times: date, machine and versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "CPUs": f"{len(os.sched_getaffinity(0))} x {_cpu_model()}",
        "memory": f"{memory:.1f} GiB",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "Linux": platform.release(),
        "Python": platform.python_version(),
    }
    return facts | {name: _version(name) for name in packages}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from a checkout"


def report(facts: Mapping[str, str], rows: Sequence[Row], json_file: Path | None) -> int:
    """Prints the table, writes the samples to `json_file`, and returns the exit code: 1 for a miss."""
    print(table(rows))
    if json_file is not None:
        content: dict[str, Any] = {
            "machine": dict(facts),
            "rows": [asdict(row) | {"ratio": row.ratio, "holds": row.holds} for row in rows],
        }
        json_file.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if all(row.holds for row in rows) else 1


# --- a benchmark's command line -------------------------------------------------------------------


def main(
    title: str,
    doc: str | None,
    subjects: Mapping[str, Subject],
    compare: Callable[[Commands, int], list[Row]],
    repeats: int = 5,
) -> int:
    """Runs a benchmark file: as the comparison, or as one of its own workers.

    Args:
        title: The report's.
        doc: What `--help` says.
        subjects: Whatever is measured, by name.
        compare: Measures and returns the rows; gets each worker's command and the number of runs.
        repeats: Runs of each subject by default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help="runs of each; the table shows medians")
    parser.add_argument("--quick", action="store_const", const=1, dest="repeats", help="one run of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--worker", choices=list(subjects), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(subjects[args.worker].prepare())
        return 0
    facts = machine(["sparkdist", "pyspark", "torch"])
    print(f"# {title}\n")
    print("\n".join(f"- {name}: {text}" for name, text in facts.items()))
    texts = (f"- {name}: `{subject.text}`" for name, subject in subjects.items())
    print("\n".join(texts), end="\n\n", flush=True)
    commands = {name: [sys.executable, sys.argv[0], "--worker", name] for name in subjects}
    return report(facts, compare(commands, args.repeats), args.json)
