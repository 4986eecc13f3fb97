"""The demo: two ranks train a small CNN on Spark, cold and warm, and beside it under bare torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from sparkdist import Results, TorchDistributor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TARGET = 0.97
RANKS = 2
SCRIPT = Path(__file__).with_name("train_digits.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]


def train() -> float:
    """What every rank runs; the import is inside, for the driver itself needs no torch."""
    from train_digits import main

    return main()


def demo() -> None:
    console = Console(highlight=False)
    console.print(
        f"[bold]Handwritten digits, {RANKS} ranks on local Spark[/bold]\n"
        "A small CNN learns scikit-learn's 1797 digits by data-parallel training, three times:\n"
        "  1. by sparkdist in a new Spark session (cold),\n"
        "  2. by sparkdist in the same session (warm),\n"
        "  3. the same code as a script under bare torchrun, to compare.\n"
        f"Each must reach {TARGET:.0%} on images it has not seen. It takes half a minute to a minute.\n"
    )
    with session() as spark:
        console.print(f"Spark {spark.version} is up: {spark.sparkContext.master}\n")
        cold = launch(console, "cold")
        warm = launch(console, "warm")
    console.print("[bold]bare torchrun[/bold]")
    bare = under_torchrun()
    console.print(f"{bare:.1f} s\n")
    console.print(where_time_went(cold, warm, bare))


def launch(console: Console, name: str) -> Results:
    console.print(f"[bold]sparkdist, {name}[/bold]")
    results = TorchDistributor(num_processes=RANKS).launch(train)
    accuracy = results.rank(0).value
    console.print(f"test accuracy {accuracy:.2%}, {results.timings.total:.1f} s\n")
    if accuracy < TARGET:
        sys.exit(f"test accuracy {accuracy:.2%} is below the target of {TARGET:.0%}")
    return results


def under_torchrun() -> float:
    """Runs the script and returns the seconds it took; it fails by itself below its target."""
    started = time.perf_counter()
    # One thread per rank is what both launchers choose here; torchrun warns unless it is said.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.call([sys.executable, *TORCHRUN, str(SCRIPT), f"--target={TARGET}"], env=env)
    if code != 0:
        sys.exit(f"torchrun ended with code {code}")
    return time.perf_counter() - started


@contextmanager
def session() -> Iterator[SparkSession]:
    """A quiet session on two local slots; what Spark says while it starts is shown if it fails to."""
    from pyspark.sql import SparkSession

    # Spark would look for a python3 on PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(f"local[{RANKS}]")
        .appName("digits")
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .config("spark.log.level", "ERROR")
    )
    with tempfile.TemporaryFile() as said:
        sys.stderr.flush()
        ours = os.dup(2)
        # Before its log level counts, Spark's JVM writes to the standard error it was started with.
        os.dup2(said.fileno(), 2)
        try:
            spark = builder.getOrCreate()
        except BaseException:
            said.seek(0)
            os.write(ours, said.read())
            raise
        finally:
            os.dup2(ours, 2)
            os.close(ours)
    try:
        yield spark
    finally:
        spark.stop()


def where_time_went(cold: Results, warm: Results, torchrun: float) -> Table:
    """A table of seconds: the phases of both runs, and their totals beside torchrun's."""
    table = Table("where the time went", title="Seconds", title_justify="left")
    for name in ("sparkdist, cold", "sparkdist, warm", "bare torchrun"):
        table.add_column(name, justify="right")
    for phase in ("slots", "start", "training", "results"):
        seconds = [getattr(run.timings, phase) for run in (cold, warm)]
        table.add_row(phase, *[f"{value:.2f}" for value in seconds])
    table.add_section()
    totals = [cold.timings.total, warm.timings.total, torchrun]
    table.add_row("total", *[f"{total:.2f}" for total in totals])
    table.add_row("compared with torchrun", *[f"{total / torchrun:.2f} x" for total in totals])
    return table


if __name__ == "__main__":
    demo()
