"""`Launcher`: one call trains a function or a script on a gang of ranks.

The story of a run: find the session (or none), take the user's code into bytes once, check what
can be checked, then hold a gang of ranks by one barrier job per attempt and settle its outcome.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sparkdist import frameworks, testing
from sparkdist.driver import devices, packages, preflight, session
from sparkdist.driver.attempt import Plan
from sparkdist.driver.board import Board
from sparkdist.driver.closure import capture
from sparkdist.driver.connect import ConnectJob
from sparkdist.driver.environment import for_ranks
from sparkdist.driver.interrupt import keyboard_interrupts
from sparkdist.driver.job import BarrierJob
from sparkdist.driver.local import LocalRun
from sparkdist.driver.modules import Finder, imports_at_once
from sparkdist.driver.parcel import Parcel, check_script, for_function, for_script
from sparkdist.driver.restarts import Attempts
from sparkdist.driver.slots import Slots
from sparkdist.errors import ConfigurationError, PreflightError, SparkdistError
from sparkdist.executor.order import Order
from sparkdist.executor.shortage import shortage
from sparkdist.results import Results, Timings
from sparkdist.settings import Settings, SettingsArgs
from sparkdist.validation import integer, optional_bool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SSL_CONF = "pytorch.spark.distributor.ignoreSsl"

Entry = Callable[..., Any] | str | os.PathLike[str]


class Launcher:
    """Runs a function or a script on ranks of a framework, on Spark or on the driver.

    Args:
        framework: Name of the plug-in: `"torch"`, or `"plain"` for any Python function.
        num_processes: Number of ranks.
        local_mode: True: on the driver. False: in Spark tasks. None: in Spark tasks when a session
            is active, else on the driver.
        use_gpu: True: one GPU per rank, an error where there are too few. False: CPU. None: GPUs
            where there are any: those of the driver, or those that Spark gives to tasks.
        ssl_conf: Name of the Spark conf that allows training where spark.ssl.enabled is true.
        **settings: See `Settings`.

    Raises:
        ConfigurationError: An argument is not valid.
    """

    def __init__(
        self,
        framework: str = "torch",
        *,
        num_processes: int = 1,
        local_mode: bool | None = None,
        use_gpu: bool | None = None,
        ssl_conf: str = SSL_CONF,
        **settings: Unpack[SettingsArgs],
    ) -> None:
        self.num_processes = integer("num_processes", num_processes, at_least=1)
        self.local_mode = optional_bool("local_mode", local_mode)
        self.use_gpu = optional_bool("use_gpu", use_gpu)
        self.settings = Settings.of(**settings)
        least = self.settings.min_processes
        if least and least > self.num_processes:
            raise ConfigurationError(f"min_processes={least} is more than num_processes={self.num_processes}")
        self.framework = frameworks.resolve(framework, self.settings.launcher)
        self.framework.check(self.settings.torchrun_args)
        self._framework_name = framework
        self._ssl_conf = ssl_conf
        self._environ = for_ranks(self.settings, self.framework.reserved_env)

    def run(self, entry: Entry, /, *args: Any, **kwargs: Any) -> Any:
        """Runs `entry` on every rank and returns what it returned on rank 0.

        Args:
            entry: A function, or the path of a Python script.
            *args: The function's arguments, or the script's (made strings).
            **kwargs: The function's; a script takes none.

        Raises:
            ConfigurationError: An input is not valid; no job was started.
            PreflightError: The session, the cluster or an executor cannot run this.
            TrainingFailed: A rank failed.
            TrainingTimeout: `timeout` or `start_timeout` passed.
            ResultError: A return value could not be brought to the driver.
        """
        return self.launch(entry, *args, **kwargs).rank(0).value

    def launch(self, entry: Entry, /, *args: Any, **kwargs: Any) -> Results:
        """Runs `entry` on every rank and returns every rank's result; see `run`."""
        with keyboard_interrupts():
            try:
                return self._launch(entry, args, kwargs)
            except SparkdistError:
                raise
            except (OSError, RuntimeError, MemoryError) as error:
                if text := shortage(error):
                    raise PreflightError(f"the driver could not start the run: {text}") from error
                raise

    def _launch(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
        began = time.monotonic()
        faults = testing.take(self.num_processes)
        spark = session.choose(self.local_mode, self.settings.spark)
        work = self._pack(entry, args, kwargs, spark)
        attempts = Attempts(self._plan(spark, work, began, faults))
        ranks = attempts.run()
        return Results(
            ranks=ranks,
            attempts=tuple(attempts.ended),
            timings=_timings(began, attempts.board),
            run_id=attempts.run_id,
            metrics=tuple(attempts.reports),
        )

    def _pack(
        self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any], spark: SparkSession | None
    ) -> _Work:
        """Takes the user's code into bytes, once."""
        ship = self.settings.ship
        if callable(entry):
            closure = capture(entry, args, dict(kwargs), session.carry_limit(spark))
            # On the driver its modules are where they are.
            parcel = for_function(closure.modules if spark else frozenset(), ship)
            return _Work(closure.data, parcel, None, tuple(Finder().installed(closure.at_once)))
        if not isinstance(entry, (str, os.PathLike)):
            raise ConfigurationError(f"expected a function or the path of a script, not {entry!r}")
        if kwargs:
            raise ConfigurationError(
                f"a script takes no keyword arguments ({', '.join(kwargs)}); pass them as its own options, "
                'such as "--lr=0.1"'
            )
        path = Path(entry).absolute()
        if spark is None:  # it runs where it is
            check_script(path)
            parcel = replace(for_function(frozenset(), ship), script=str(path))
        else:
            parcel = for_script(path, ship)
        assert parcel.script
        at_once = Finder(path.resolve().parent).installed(imports_at_once(path))
        return _Work(b"", parcel, (parcel.script, *map(str, args)), tuple(at_once))

    def _order(self, work: _Work, faults: tuple[testing.Fault, ...]) -> Order:
        """Makes the order for a run on the driver; one on Spark has tasks."""
        settings = self.settings
        return Order(
            run_id=secrets.token_hex(8),
            attempt=0,
            framework=self._framework_name,
            launcher=settings.launcher,
            launcher_args=settings.torchrun_args,
            world_size=self.num_processes,
            tasks=1,
            processes_per_task=self.num_processes,
            script=work.script,
            env=self._environ,
            threads=max(1, len(os.sched_getaffinity(0)) // self.num_processes),
            control=None,
            token="",
            logs=settings.logs,
            idle_timeout=settings.idle_timeout,
            logs_json=settings.logs_json is not None,
            max_restarts=settings.max_restarts,
            keep=settings.keep,
            stall_timeout=settings.stall_timeout,
            ports=(ports.start, ports.stop - 1) if (ports := settings.ports) else None,
            faults=faults,
        )

    def _plan(
        self, spark: SparkSession | None, work: _Work, began: float, faults: tuple[testing.Fault, ...] = ()
    ) -> Plan:
        """Prepares the run."""
        limit = self.settings.timeout
        plan = partial(Plan, settings=self.settings, deadline=None if limit is None else began + limit)
        order = self._order(work, faults)
        function, parcel = work.function, work.parcel.data
        if spark is None:
            gpus = devices.driver_gpus(self.use_gpu, self.num_processes)
            order, folder = self._equip(order, None, work)
            local = partial(LocalRun, function=function, parcel=parcel, environ=gpus, packages=folder)
            return plan(order=order, make_gang=local, endpoint=("127.0.0.1", "127.0.0.1"), slots=None)
        conf, profile = session.confs(spark), self.settings.resources
        per_task_gpus = devices.gpus_per_task(self.use_gpu, self.num_processes, conf, profile)
        per_task = self.framework.processes_per_task(per_task_gpus)
        tasks = -(-self.num_processes // per_task)
        preflight.check(conf, per_task_gpus, self._ssl_conf)
        order = replace(
            order,
            tasks=tasks,
            processes_per_task=per_task,
            gpus_per_task=per_task_gpus,
            threads=max(1, session.cores_per_task(conf, profile) // per_task),
        )
        order, _ = self._equip(order, spark, work)
        job = ConnectJob if session.is_connect(spark) else BarrierJob
        return plan(
            order=order,
            make_gang=lambda order: job(spark, conf, order, function, parcel, profile),
            endpoint=session.control_endpoint(spark, conf),
            slots=Slots(spark, conf, profile),
        )

    def _equip(self, order: Order, spark: SparkSession | None, work: _Work) -> tuple[Order, Path | None]:
        return packages.equip(
            order, self.settings.environment, spark, self.framework.distribution, work.modules
        )


@dataclass(frozen=True)
class _Work:
    """The user's code in bytes: a pickled function, or a script's name and arguments; what it imports."""

    function: bytes
    parcel: Parcel
    script: tuple[str, ...] | None
    modules: tuple[str, ...]


def _timings(began: float, board: Board) -> Timings:
    """Cuts the run's time where the gang's news came; without news all of it counts as slots."""
    marks = [began]
    for news in (board.nodes, board.entered, board.returned):
        marks.append(max([marks[-1], *news.values()]))
    slots, start, training, results = (
        later - earlier for earlier, later in zip(marks, [*marks[1:], time.monotonic()], strict=True)
    )
    return Timings(slots=slots, start=start, training=training, results=results)
