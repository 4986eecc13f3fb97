"""The barrier job that holds a gang on Spark, run in a thread of its own with its own job group."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sparkdist.driver.bootstrap import bootstrap
from sparkdist.driver.parcel import package_zip
from sparkdist.executor.leader import Row
from sparkdist.executor.order import Order

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class BarrierJob:
    """One attempt on a classic session.

    An RDD rather than a DataFrame: it needs neither pandas nor pyarrow in the workers. The barrier
    is in the result stage, so that Spark makes exactly one attempt and retries are ours.
    """

    def __init__(self, session: SparkSession, order: Order, function: bytes, parcel: bytes) -> None:
        self._session = session
        self._context = session.sparkContext
        self._order = order
        self._function = function
        self._parcel = parcel
        self._group = f"sparkdist-{uuid.uuid4()}"

    def run(self) -> list[Row]:
        """Runs the job to its end and returns all its rows; to be called in the job's own thread.

        Raises:
            Exception: The job failed on Spark's side: a worker or an executor was lost, or the job
                was cancelled. Ranks' failures are rows.
        """
        mapped = _by_value(*package_zip(), self._order.to_json(), self._function, self._parcel)
        tasks = self._order.tasks
        description = f"sparkdist run {self._order.run_id}: {self._order.world_size} ranks"
        self._context.setJobGroup(self._group, description, interruptOnCancel=False)
        rdd = self._context.parallelize(range(tasks), tasks).barrier().mapPartitions(mapped)
        return list(rdd.collect())

    def cancel(self) -> None:
        """Has Spark cancel the job: what is left where agents cannot be reached."""
        self._context.cancelJobGroup(self._group)

    def holds_slots(self) -> bool:
        """Says whether all the gang's tasks are running."""
        tracker = self._context.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._group))
        stages = (tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds)
        return sum(stage.numActiveTasks for stage in stages if stage) == self._order.tasks

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Returns a thread that keeps the caller's job properties, such as its scheduler pool."""
        from pyspark import InheritableThread

        return InheritableThread(target)


def _by_value(*args: Any) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """Returns the bootstrap such that Spark pickles it by value: executors may lack this package."""
    from pyspark import cloudpickle

    from sparkdist.driver import bootstrap as module

    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return bootstrap(*args)
