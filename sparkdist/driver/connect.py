"""The barrier job that holds a gang on Spark Connect, where the client sees neither slots nor stages."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdist.driver.bootstrap import arrow_bootstrap
from sparkdist.driver.idle import idle_workers_spared
from sparkdist.driver.job import answers, by_value
from sparkdist.driver.local import IMPORTING
from sparkdist.driver.parcel import package_zip
from sparkdist.driver.session import Confs, cores_per_task, first_lines, is_local, server_answers
from sparkdist.driver.slots import connect_cores, too_few
from sparkdist.errors import ConfigurationError, PreflightError
from sparkdist.executor.leader import Row
from sparkdist.executor.order import Order

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_IN_PLAN = 4 << 20  # bytes; 120 MB in a plan end a server with Spark's default heap of 1 GB
_LOOK = 1.0  # s between looks at how the operation fares
_SUBMIT_TIME = 5.0  # s until Spark must have taken the job; its progress is reported every 2
_SECOND_LOOK = 20.0  # s; Spark counts slots again after 15, and executors may have come since
_STOPPED = re.compile(r"SESSION_CLOSED|INVALID_CURSOR\.DISCONNECTED|Channel closed")  # before it knows itself
_LOST_TIME = 15.0  # s without a connection after which the server counts as lost


class ConnectJob:
    """One attempt on a Connect session.

    The operation runs in a thread of its own, since a client whose server is gone goes on trying
    for ten minutes.

    Raises:
        ConfigurationError: What travels is too large for a plan, and may not be written to disks.
    """

    def __init__(
        self,
        session: SparkSession,
        conf: Confs,
        order: Order,
        function: bytes,
        parcel: bytes,
        profile: ResourceProfile | None,
    ) -> None:
        self._session = session
        self._conf = conf
        self._order = order
        self._parts = (function, parcel)
        if max(map(len, self._parts)) > _IN_PLAN and conf("spark.io.encryption.enabled") == "true":
            raise ConfigurationError(
                "the function, or what is sent with it, is too large to travel without a file, and "
                "spark.io.encryption.enabled is true, which such a file would not follow. Load it inside the "
                "function from storage that every rank can read."
            )
        self._profile = profile
        self._tag = f"sparkdist-{uuid.uuid4()}"
        self._tags = {*session.getTags(), self._tag}  # tags are of a thread: these are the caller's
        self._done: Future[Any] = Future()
        self._thread = threading.Thread(target=self._execute, name="sparkdist-operation", daemon=True)
        self._sent = math.inf  # when the operation was sent (time.monotonic())
        self._taken = False  # Spark has accepted the job
        self._running = 0  # tasks, as last reported

    def run(self) -> list[Row]:
        """Runs the job to its end and returns all its rows.

        Raises:
            PreflightError: The cluster has too few slots.
            Exception: The job failed on Spark's side or the server was lost; ranks' failures are rows.
        """
        note: Any = self._note  # of no class of pyspark's, which it asks for and does not need
        self._session.registerProgressHandler(note)
        try:
            self._thread.start()
            self._watch()
            table = self._done.result()
        except (PreflightError, OSError):
            raise
        except Exception as error:
            if self._session.is_stopped or _STOPPED.search(str(error)):  # type: ignore[attr-defined]
                raise ConnectionError("the Spark session was stopped") from None
            raise RuntimeError(first_lines(error)) from None  # without the server's stacks
        finally:
            self._session.removeProgressHandler(note)
        headers = map(json.loads, table["header"].to_pylist())
        return list(zip(headers, table["body"].to_pylist(), strict=True))

    def _execute(self) -> None:
        try:
            self._done.set_result(self._collect())
        except BaseException as error:
            self._done.set_exception(error)

    def _collect(self) -> Any:
        from pyspark.sql.types import BinaryType, LongType, StringType, StructType

        for tag in self._tags:
            self._session.addTag(tag)
        parts = [self._upload(part) if len(part) > _IN_PLAN else part for part in self._parts]
        mapped = by_value(arrow_bootstrap, *package_zip(), self._order.to_json(), *parts)
        numbers = self._session.range(0, self._order.tasks, 1, self._order.tasks)
        # Else the client asks the server what columns numbers have.
        numbers._cached_schema = StructType().add("id", LongType(), False)  # type: ignore[attr-defined]
        schema = StructType().add("header", StringType()).add("body", BinaryType())
        with idle_workers_spared(self._session, self._conf):
            job = numbers.mapInArrow(mapped, schema, barrier=True, profile=self._profile)
            self._sent = time.monotonic()
            return job.toArrow()

    def _upload(self, data: bytes) -> str:
        """Has the session carry data to executors as a file, and returns its name there."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"sparkdist-{hashlib.sha256(data).hexdigest()}")
            path.write_bytes(data)
            self._session.addArtifacts(str(path), file=True)
        return path.name

    def _note(
        self, stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        """Takes the session's progress reports; those of an operation come in its own thread."""
        if threading.current_thread() is self._thread and stages:
            self._taken = True
            self._running = inflight_tasks

    def _watch(self) -> None:
        """Waits for the operation's end.

        Raises:
            PreflightError: Spark does not take the job.
            ConnectionError: There is no server any more.
        """
        connected = time.monotonic()
        patience = _SUBMIT_TIME
        while not wait([self._done], _LOOK).done:
            if server_answers(self._session, _LOOK):
                connected = time.monotonic()
            elif time.monotonic() - connected > _LOST_TIME:
                self.cancel()
                raise ConnectionError(f"the Spark Connect server ({self._session.client.host}) is gone")
            if not self._taken and time.monotonic() - self._sent > patience:
                self._check_slots(may_wait=patience == _SUBMIT_TIME)
                patience = _SECOND_LOOK if patience == _SUBMIT_TIME else math.inf

    def _check_slots(self, may_wait: bool) -> None:
        """Refuses a job that Spark has not taken: it never shows a stage of one that is too large."""
        tasks, cores = self._order.tasks, connect_cores(self._session, self._conf, self._profile)
        if may_wait and (cores is None or cores >= tasks * cores_per_task(self._conf, self._profile)):
            return
        if not may_wait and self._conf("spark.connect.progress.reportInterval"):
            return  # then it may have been taken and not been reported
        self.cancel()
        has = "does not have them" if cores is None else f"({self._conf('spark.master')}) has {cores} cores"
        raise PreflightError(too_few(tasks, has))

    def cancel(self) -> None:
        """Has Spark cancel the operation, also where it is only about to reach the server."""
        threading.Thread(target=self._interrupt, name="sparkdist-cancel", daemon=True).start()

    def _interrupt(self) -> None:
        while not self._done.done():
            try:
                self._session.interruptTag(self._tag)
            except Exception:
                return  # there is no server, or no session, any more
            wait([self._done], _LOOK)

    def is_unheard(self) -> bool:
        """Says whether tasks are running that may be unable to reach the driver."""
        if is_local(self._conf("spark.master")) and answers(self._order.control):
            return False  # they are on this host, and would reach it
        return self._running == self._order.tasks

    def lost_executor(self) -> bool:
        """Says that one may be gone: the client is not told."""
        return not is_local(self._conf("spark.master"))

    def waiting_for(self) -> str:
        """Says what the gang waits for while no agent has reported."""
        return IMPORTING if self._running else "still waiting for slots"

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Returns a plain thread."""
        return threading.Thread(target=target, name="sparkdist-run", daemon=True)
