"""The barrier job that holds a gang on Spark, run in a thread of its own with its own job group."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdist.driver.bootstrap import arrow_bootstrap, bootstrap, unpack_package
from sparkdist.driver.idle import executors_kill, idle_workers_spared
from sparkdist.driver.local import IMPORTING, own_folder
from sparkdist.driver.parcel import package_zip
from sparkdist.driver.session import Confs, is_local
from sparkdist.errors import PreflightError
from sparkdist.executor.leader import Row, Site, warm_up, without_secrets
from sparkdist.executor.order import Host, Order

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

T = TypeVar("T")

ROW_SCHEMA = "header string, body binary"  # of rows as a DataFrame
_ANSWER_TIME = 1.0  # s
_NOTICE_TIME = 2.0  # s that Spark gets to notice that an executor is gone
_CANCEL_AGAIN = 0.5  # s; Spark forgets a cancel that finds no job
_WARMED: set[tuple[str, str, str]] = set()  # (application, framework, launcher)


class BarrierJob:
    """One attempt on a classic session.

    An RDD rather than a DataFrame: it needs neither pandas nor pyarrow in the workers. The barrier
    is in the result stage, so that Spark makes exactly one attempt and retries are ours.
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
        self._context = session.sparkContext
        self._order = order
        self._function = function
        self._parcel = parcel
        self._profile = profile
        self._tag = f"sparkdist-{uuid.uuid4()}"
        # Whoever has put this thread in a group can cancel the run by it.
        self._group = self._context.getLocalProperty("spark.jobGroup.id")
        self._ended = threading.Event()
        self._is_cancelled = False
        self._executors: set[str] = set()

    def run(self) -> list[Row]:
        """Runs the job to its end and returns all its rows; to be called in the job's own thread.

        Raises:
            Exception: The job failed on Spark's side: a worker or an executor was lost, or the job
                was cancelled. Ranks' failures are rows.
        """
        self._executors = self._executors_now()
        try:
            return self._run(self._share_host())
        except Exception:
            if self._context._jsc is None:  # which pyspark stumbles over, before it says so
                raise ConnectionError("the Spark session was stopped") from None
            raise
        finally:
            self._ended.set()

    def _run(self, order: Order) -> list[Row]:
        if self._group is None:
            self._group = self._tag
            description = f"sparkdist run {order.run_id}: {order.world_size} ranks"
            self._context.setJobGroup(self._group, description, interruptOnCancel=False)
        self._context.addJobTag(self._tag)
        args = (*package_zip(), order.to_json(), self._function, self._parcel)
        if executors_kill(self._conf):
            return self._run_as_dataframe(by_value(arrow_bootstrap, *args))
        tasks = self._context.parallelize(range(order.tasks), order.tasks)
        rdd = tasks.barrier().mapPartitions(by_value(bootstrap, *args))
        if self._profile is not None:
            rdd = rdd.withResources(self._profile)
        self._check_cancelled()
        return list(rdd.collect())

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise RuntimeError("the job was cancelled before it was submitted")

    def _run_as_dataframe(self, mapped: Callable[[Iterable[Any]], Iterator[Any]]) -> list[Row]:
        """Runs the job where Spark kills idle workers: only for a DataFrame that can be switched off."""
        numbers = self._session.range(0, self._order.tasks, 1, self._order.tasks)
        with idle_workers_spared(self._session, self._conf):
            frame = numbers.mapInArrow(mapped, ROW_SCHEMA, barrier=True, profile=self._profile)
            self._check_cancelled()
            return [(json.loads(row["header"]), bytes(row["body"])) for row in frame.collect()]

    def _share_host(self) -> Order:
        """On a local master, has the framework imported while Spark starts its first Python workers.

        Executors are in the driver's own JVM there, so their forkserver may have its place with
        the driver. Should the tasks need another kind after all, they start it.
        """
        context = self._context
        if not is_local(context.master) or shutil.which(context.pythonExec) != sys.executable:
            return self._order
        if self._order.packages:
            return self._order  # Spark unpacks an archive anew for the first task that needs it
        try:
            base = own_folder(os.getpid())
            root = unpack_package(str(base), *package_zip())
        except (PreflightError, OSError):
            return self._order  # the driver's temporary folder cannot be used; Spark's may
        host = Host(base=str(base), root=root, pid=os.getpid())
        order = replace(self._order, host=host)
        warmed = (context.applicationId, order.framework, order.launcher)
        if warmed not in _WARMED:
            _WARMED.add(warmed)
            site = Site(root=host.root, base=base, parent=host.pid, sys_path=(), cwd="/")
            warm_up(order, site, without_secrets({**os.environ, **context.environment}))
        return order

    def cancel(self) -> None:
        """Has Spark cancel the job, also one that is about to be submitted."""
        self._is_cancelled = True
        threading.Thread(target=self._cancel, name="sparkdist-cancel", daemon=True).start()

    def _cancel(self) -> None:
        with suppress(Exception):  # there is no JVM, or no application, any more
            scala = self._context._jsc.sc()
            scala.cancelJobsWithTag(self._tag)
            while not self._ended.wait(_CANCEL_AGAIN):
                scala.cancelJobsWithTag(self._tag)

    def is_unheard(self) -> bool:
        """Says whether tasks are running that may be unable to reach the driver."""
        if is_local(self._context.master) and answers(self._order.control):
            return False  # they are on this host, and would reach it
        return self._holds_slots()

    def lost_executor(self) -> bool:
        """Says whether an executor that it started on is gone, giving Spark a moment to notice."""
        deadline = time.monotonic() + _NOTICE_TIME
        while self._executors and time.monotonic() < deadline:
            now = self._executors_now()
            if now and not self._executors <= now:
                return True
            time.sleep(_NOTICE_TIME / 20)
        return False

    def _executors_now(self) -> set[str]:
        """Returns the executors, the driver among them; none on a local master, or where nobody can tell."""
        if is_local(self._context.master):
            return set()
        try:
            return set(self._context._jsc.sc().getExecutorMemoryStatus().keys().mkString(" ").split())
        except Exception:
            return set()  # there is no JVM any more

    def waiting_for(self) -> str:
        """Says what the gang waits for while no agent has reported."""
        if self._holds_slots():
            return IMPORTING
        tasks = self._order.tasks
        return f"still waiting for {tasks} slot{'s' * (tasks > 1)}"

    def _holds_slots(self) -> bool:
        tracker = self._context.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._group))
        stages = (tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds)
        return any(stage.numActiveTasks == self._order.tasks for stage in stages if stage)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Returns a thread that keeps the caller's job properties, such as its scheduler pool."""
        from pyspark import InheritableThread

        thread = InheritableThread(target)
        thread.daemon = True  # Spark may take long to end a job that nobody waits for any more
        return thread


def answers(address: tuple[str, int] | None) -> bool:
    """Says whether somebody listens at an address."""
    try:
        socket.create_connection(address or ("", 0), timeout=_ANSWER_TIME).close()
    except OSError:
        return False
    return True


def by_value(make: Callable[..., T], *args: Any) -> T:
    """Returns a bootstrap such that Spark pickles it by value: executors may lack this package."""
    from pyspark import cloudpickle

    from sparkdist.driver import bootstrap as module

    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return make(*args)
