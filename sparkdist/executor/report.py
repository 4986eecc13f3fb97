"""What became of a node's ranks, as rows for the driver."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from sparkdist import wire
from sparkdist.executor import process
from sparkdist.executor.link import Link
from sparkdist.executor.logs import LogPump
from sparkdist.executor.ranks import RETURNED, Rank
from sparkdist.executor.staff import Staff


def outcomes(
    staff: Staff, link: Link, pumps: Mapping[int, LogPump], memory_kills: int
) -> list[tuple[wire.Header, bytes]]:
    """Returns a row for each ended rank, with the bytes of its outcome if they are not too large for one.

    Args:
        staff: The ranks.
        link: Where large outcomes are sent.
        pumps: Each rank's last lines.
        memory_kills: How many processes the kernel had ended for memory before the run.
    """
    out_of_memory = process.memory_kills() > memory_kills
    epoch = time.time() - time.monotonic()  # read once, so that moments keep their order
    rows = []
    for rank in staff.ranks:
        row = _row(rank, staff, pumps[rank.rank].tail(), epoch)
        if row.get("signal") == "SIGKILL" and out_of_memory:
            row["hint"] = "out of memory: the kernel's limit for this container killed a process"
        size = row["size"] = rank.outcome_size()
        data = b""
        if size > wire.ROW_LIMIT:
            row["sha256"] = link.send_outcome(rank.rank, rank.pipes.outcome, size)
        else:
            data = rank.read_outcome()
        rows.append((row, data))
    if staff.folder.kept:
        staff.folder.kept.is_done = all(row["kind"] in RETURNED for row, _ in rows)
    return rows


def _row(rank: Rank, staff: Staff, tail: list[str], epoch: float) -> wire.Header:
    """Returns what the driver is told of an ended rank, but for its outcome."""
    row = rank.verdict(staff.order.script is not None)
    row |= {"rank": rank.rank, "node": staff.node.index, "host": socket.gethostname()}
    if row["kind"] == "stopped" and staff.launcher:
        row["message"] = f"{staff.order.launcher} {staff.launcher.end}"
    if rank.silent or row["kind"] not in (*RETURNED, "stopped"):
        row["log_tail"] = tail
    if row["kind"] not in (*RETURNED, "stopped"):
        row["own_error"] = wire.cut(staff.own_error(rank))
        row["failed_at"] = row.get("at", epoch + rank.failed_at)
        row["speechless"] = not rank.complained and not staff.framework.whole_node
        row["secondhand"] = not rank.complained and staff.framework.whole_node
    return row
