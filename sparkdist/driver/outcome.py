"""From a finished attempt to results, or to the error that tells what really went wrong."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkdist import values, wire
from sparkdist.driver.board import Board
from sparkdist.driver.session import message_of
from sparkdist.errors import Failure, PreflightError, ResultError, TrainingFailed
from sparkdist.executor.leader import FAILED, Row
from sparkdist.executor.order import NodeError, Order
from sparkdist.executor.shortage import is_of_disk, shortage, unusable
from sparkdist.results import RankResult

_REASON_LINES = 20
_TOO_LARGE = (
    "has {size} bytes pickled; what is over {limit} bytes travels over the control channel, which could not "
    "be used. Write it to storage and return its path, or set spark.driver.host to an address that executors "
    "reach."
)
_NO_MEMORY = "has {{size}} bytes pickled, and the driver cannot take it: {reason}"

_GANG_FAILED = "Job aborted due to stage failure"  # else Spark, or somebody by Spark, has ended the job
_EXECUTOR_LOST = re.compile(
    r"^.*(?:ExecutorLostFailure|decommission|executor \S+ (?:was |is )?lost).*", re.I | re.M
)
_SAME_MOMENT = 1.0  # s; an executor that is lost later than a rank's failure is not its cause

# How Spark itself says that a worker's Python is not the driver's, before any of our code runs there.
_MISMATCH = re.compile(r"PYTHON_VERSION_MISMATCH\D*(\d+)\D{1,2}(\d+)\D+(\d+\.\d+)")


def settle(order: Order, board: Board) -> tuple[RankResult, ...]:
    """Returns every rank's result, in rank order.

    Raises:
        TrainingFailed: Ranks failed, or Spark lost them.
        ResultError: A value could not be brought here.
        PreflightError: A node could not start its ranks.
    """
    try:
        rows = board.rows.result()
    except NodeError as error:
        raise PreflightError(str(error)) from None
    except PreflightError:
        raise
    except Exception as error:
        found = _MISMATCH.search(message_of(error))
        if found:
            raise PreflightError(_other_python(f"{found[1]}.{found[2]}", found[3])) from None
        if text := _of_driver(error):
            raise PreflightError(f"the driver could not have the gang started: {text}") from error
        taken = _EXECUTOR_LOST.search(message_of(error))
        reason = (
            f"an executor of the gang was lost: {taken[0]}"
            if taken
            else f"the gang was lost: {_reason(error)}"
        )
        raise _lost(order, board, reason, preempted=bool(taken)) from error
    for header, _ in rows:
        if header["kind"] == "error":
            raise PreflightError(header["message"])
    ranks = sorted((row for row in rows if "host" in row[0]), key=lambda row: row[0]["rank"])
    failures = _failures(ranks, board)
    if failures or board.executor_lost:
        failures = _with_lost(failures, order, ranks, board)
    if failures:
        raise TrainingFailed(failures, order.run_id)
    tasks = sum(header["kind"] == "task" for header, _ in rows)
    if tasks != order.tasks:
        raise _lost(order, board, f"only {tasks} of {order.tasks} Spark tasks reported")
    stopped = [header for header, _ in ranks if header["kind"] == "stopped"]
    if stopped or len(ranks) != order.world_size:
        reasons = [header["message"] for header in stopped if "message" in header]
        raise _lost(order, board, (reasons or ["the ranks were stopped from outside"])[0])
    return tuple(_result(header, blob, board) for header, blob in ranks)


def is_called_off(board: Board) -> bool:
    """Says whether the gang's job was cancelled, or its session is gone: then nothing may follow it."""
    error = board.rows.exception() if board.rows.done() and not board.cancelled else None
    return error is not None and _GANG_FAILED not in message_of(error)


def _of_driver(error: Exception) -> str:
    """Says what this process, or its disk, has too little of, where that is what an error means."""
    if isinstance(error, OSError) and is_of_disk(error) and error.filename:
        return unusable(Path(error.filename).parent, error, "TMPDIR; spark.local.dir, with a new session")
    return "" if hasattr(error, "java_exception") else shortage(error)  # Spark's may be an executor's


def _lost(order: Order, board: Board, message: str, preempted: bool = False) -> TrainingFailed:
    """Makes the failure of a gang of which no rows came; a rank that was heard to fail is its root."""
    ranks = sorted(range(order.world_size), key=lambda rank: rank not in board.failed[:1])
    if board.failed:
        message = f"rank {board.failed[0]} failed, and how did not reach the driver: {message}"
    failures = {
        rank: Failure(rank=rank, kind="lost", order=place, message=message, preempted=preempted)
        for place, rank in enumerate(ranks)
    }
    return TrainingFailed(failures, order.run_id)


def _with_lost(
    failures: dict[int, Failure], order: Order, ranks: list[Row], board: Board
) -> dict[int, Failure]:
    """Puts the ranks of a lost executor before those that failed because of it.

    Nobody is left to speak for them: they have no rows, and their agent was gone without a word.
    """
    missing = sorted(set(range(order.world_size)) - {header["rank"] for header, _ in ranks})
    spoke = {header["node"] for header, _ in ranks}  # these lost an agent or a connection, and no more
    lost_at = min((at for node, at in board.lost.items() if node not in spoke), default=math.inf)
    others = [at for node, at in board.lost.items() if node in spoke]
    if (
        not missing
        or math.isinf(lost_at)
        or lost_at > min([board.failed_at or math.inf, *others]) + _SAME_MOMENT
    ):
        return failures
    message = "its executor was lost" if board.executor_lost else "its Spark worker was lost"
    first = {
        rank: Failure(rank=rank, kind="lost", order=place, message=message, preempted=board.executor_lost)
        for place, rank in enumerate(missing)
    }
    return first | {rank: replace(f, order=f.order + len(first)) for rank, f in failures.items()}


def _other_python(worker: str, driver: str) -> str:
    return (
        f"the executors run Python {worker}, the driver runs Python {driver}. Have Spark use Python {driver} "
        "for its own workers there: PYSPARK_PYTHON or spark.pyspark.python names it. environment= is for the "
        "ranks below them."
    )


def _reason(error: BaseException) -> str:
    """Returns what Spark says of a job that ended, without the JVM's own stack."""
    lines = [line for line in message_of(error).splitlines() if not line.startswith("\tat ")]
    return "\n".join(lines[:_REASON_LINES]) or values.type_name(error)


def _failures(rows: list[Row], board: Board) -> dict[int, Failure]:
    """Makes the failures, the first in time first.

    On one host the times count that ranks and agents name. Clocks of hosts differ: between them it
    is the order in which agents told of failures. A rank that died without a word comes first all
    the same: its peers on other nodes saw its connection end, and their exceptions may be here
    before its agent's word. (What dies later has been asked to stop, and is no failure.) A rank of
    which only its launcher spoke comes after those that said themselves what happened: launchers of
    other nodes end theirs. A value that does not pickle is not a failure of the training and comes
    after all.
    """
    failed = [row for row in rows if row[0]["kind"] in FAILED]
    told = board.failed if len({header["host"] for header, _ in failed}) > 1 else []
    failed.sort(key=lambda row: _place_in_time(row[0], told))
    return {
        header["rank"]: _failure(header, _data(header, blob, board), place)
        for place, (header, blob) in enumerate(failed)
    }


def _place_in_time(header: wire.Header, told: list[int]) -> tuple[bool, bool, int, float]:
    rank = header["rank"]
    place = told.index(rank) if rank in told else len(told)
    doubtful = bool(header.get("secondhand"))
    return not header.get("speechless"), doubtful, place, header.get("failed_at", 0.0)


def _failure(header: wire.Header, data: bytes | bytearray | None, place: int) -> Failure:
    common: dict[str, Any] = {
        "rank": header["rank"],
        "order": place,
        "hint": header.get("hint", ""),
        "log_tail": tuple(header.get("log_tail", ())),
    }
    kind = header["kind"]
    if kind == "raised":
        return Failure(
            kind="exception",
            type_name=header["type_name"],
            bases=tuple(header["bases"]),
            message=header["message"],
            traceback=header["traceback"],
            exception=values.load_exception(data, header["type_name"]),
            **common,
        )
    message = header.get("message") or header.get("own_error", "")
    if kind == "exited":
        return Failure(kind="exit", exit_code=header["code"], message=message, **common)
    if kind == "signal":
        name = header["signal"]
        return Failure(kind="signal", signal=name, message=message, preempted=name == "SIGTERM", **common)
    return Failure(kind="lost", message=message, **common)


def _result(header: wire.Header, blob: bytes, board: Board) -> RankResult:
    rank, type_name = header["rank"], header["type_name"]
    if header["kind"] == "unpicklable":
        raise ResultError(rank, type_name, header["message"])
    data = _data(header, blob, board)
    if data is None:
        reason = _NO_MEMORY.format(reason=board.shortage) if board.shortage else _TOO_LARGE
        raise ResultError(rank, type_name, reason.format(size=header["size"], limit=wire.ROW_LIMIT))
    try:
        if isinstance(data, bytearray):  # a large one
            value = values.loads_and_empty(data)
        else:
            value = values.loads(data) if data else None
    except Exception as error:
        text = shortage(error) or f"{type(error).__name__}: {values.safe_text(error)}"
        reason = f"does not unpickle on the driver ({text})"
        raise ResultError(rank, type_name, reason) from error
    return RankResult(
        rank=rank, value=value, host=header["host"], node=header["node"], seconds=header["seconds"]
    )


def _data(header: wire.Header, blob: bytes, board: Board) -> bytes | bytearray | None:
    """Returns a rank's outcome: the row's, or one from the control channel that is what the row names."""
    if "sha256" not in header:
        return blob
    data = board.outcomes.pop(header["rank"], None)
    if data is None or hashlib.sha256(data).hexdigest() != header["sha256"]:
        return None
    return data
