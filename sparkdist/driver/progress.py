"""What ranks report of their training: read from where it comes, and shown in a few words."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from sparkdist.driver.board import Board
from sparkdist.driver.lines import safe
from sparkdist.results import Report

_SHOWN = 3  # metrics
_NAME = 20  # characters of a metric's name


def take(board: Board, rank: object, lines: bytes) -> None:
    """Notes a rank's reports.

    Args:
        board: Where.
        rank: The rank.
        lines: What it reported, each report as a line of JSON; what is no report is left out.
    """
    if not isinstance(rank, int):
        return
    reports = [report for line in lines.split(b"\n") if (report := _read(rank, line))]
    if reports:
        board.note(lambda board: board.add_reports(rank, reports))


def _read(rank: int, line: bytes) -> Report | None:
    try:
        said = json.loads(line)
        return Report(
            attempt=int(said["attempt"]),
            rank=rank,
            step=None if said["step"] is None else int(said["step"]),
            metrics={name: float(value) for name, value in said["metrics"].items()},
            time=datetime.fromtimestamp(said["time"], UTC),
        )
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, RecursionError):
        return None  # not a whole one, or one that was dropped, or no report at all


def headline(board: Board) -> str:
    """Says how far the training is, such as `step 120, loss=0.123`; "" if no rank has said so."""
    report = board.last_report
    if not report:
        return ""
    step = [] if report.step is None else [f"step {report.step}"]
    return ", ".join([*step, *map(_shown, list(report.metrics.items())[:_SHOWN])])


def _shown(metric: tuple[str, float]) -> str:
    name, value = metric
    return f"{safe(name[:_NAME])}={value:.4g}".replace("\n", " ")
