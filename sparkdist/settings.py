"""Every setting of the engine, defined once.

The front doors and `Launcher` take these as keyword arguments and pass them through;
`Settings` checks them when it is made, on the driver, before any job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypedDict

from sparkdist import validation
from sparkdist.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

FORWARDED = (
    "HOROVOD_*",
    "NCCL_*",
    "GLOO_*",
    "TORCH_*",
    "PYTORCH_*",
    "OMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "KMP_*",
    "KERAS_*",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "PYTHONFAULTHANDLER",
    "TOKENIZERS_PARALLELISM",
)

_MARGIN = 60.0  # s for what else happens between two attempts

Logs = Literal["all", "rank0", "none"]
LauncherKind = Literal["fast", "torchrun"]


class SettingsArgs(TypedDict, total=False):
    """The keyword arguments that make a `Settings`; see there for each."""

    timeout: float | None
    start_timeout: float
    env: Mapping[str, str]
    forward_env: Iterable[str]
    ship: Iterable[str | os.PathLike[str]]
    logs: Logs
    spark: SparkSession | None
    launcher: LauncherKind
    torchrun_args: Iterable[str]
    idle_timeout: float
    environment: str | os.PathLike[str] | Iterable[str] | None
    resources: ResourceProfile | None
    ports: str | None
    logs_json: str | os.PathLike[str] | None
    stdout: TextIO | None
    stderr: TextIO | None
    log_time: bool
    status: bool | None
    max_restarts: int
    restart_on: Iterable[type[BaseException] | int] | None
    no_restart_on: Iterable[type[BaseException] | int]
    max_preemptions: int | None
    min_processes: int | None
    resize_wait: float
    grow: bool
    stall_timeout: float | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The engine's settings.

    Attributes:
        timeout: Seconds that the whole run may take; None for no limit.
        start_timeout: Seconds until every rank must have entered the function.
        env: Environment variables for every rank. They win over everything else; the launcher's
            own names (`RANK`, `MASTER_ADDR`, ...) are refused.
        forward_env: Names or globs of environment variables copied from the driver to every rank.
            They win over what sparkdist computes. A glob never forwards a name that looks like a
            credential (`*TOKEN*`, `*SECRET*`, `*PASSWORD*`, `*KEY*`, `*CREDENTIAL*`).
        ship: Files and folders sent with the job; ranks find them by base name with
            `sparkdist.context().shipped(name)`, and shipped Python modules can be imported.
        logs: Which ranks' output the driver prints, each line behind `[rank 3]`.
        spark: The session to run on; default: the active one.
        launcher: `"fast"` forks ranks from a warm server; `"torchrun"` runs the real torchrun
            command inside the leading task of each executor.
        torchrun_args: Options for that command, such as `["--max-restarts=2"]`.
        idle_timeout: Seconds without a run after which a warm server ends.
        environment: The Python environment of the ranks: an archive that venv-pack or conda-pack made
            (`.tar.gz`, `.tgz` or `.zip`), or a list of requirements, resolved once on the driver.
            Default: the executors' own.
        resources: A resource profile for the tasks that hold the ranks, and for nothing else.
        ports: Fixed ports for firewalls, `"29500-29600"` or `"29500"`: the gang's store and the
            driver's control channel listen on free ones of these. Default: any free port.
        stdout: Where the driver prints what ranks write to their stdout: anything with a `write`.
            Default: its own `sys.stdout`.
        stderr: Likewise.
        log_time: Whether each line also says when the driver had it.
        logs_json: A file on the driver that gets what ranks say through Python's logging, one JSON
            object per line.
        status: Whether one line on the terminal or in the notebook says how far the run is, as
            long as it lasts; None for wherever somebody can see it.
        max_restarts: How many failures of ranks start the gang again before one ends the run.
        restart_on: What a failure must be to do so: exception types (their subtypes too) and exit
            codes (of a signal its negative number); None for any.
        no_restart_on: What ends the run at once all the same; preemptions too.
        max_preemptions: How often the gang may lose an executor, or a rank by a SIGTERM from
            outside, and start again; this is not counted as a restart. None for any number, but
            five in a row without a report (`sparkdist.report`) end the run.
        min_processes: Makes the gang elastic: an attempt starts with as many ranks as there are slots
            for, at least so many and at most `num_processes`. None for `num_processes` always.
        resize_wait: Seconds that an elastic attempt waits for slots for all ranks.
        grow: Whether a running elastic gang is ended, and started larger, when there are slots for
            it; that is not counted as a restart.
        stall_timeout: Seconds after which ranks that do nothing, neither computing nor reading,
            writing or printing, count as failed; None for never. A rank that waits for its peers in
            a collective does so only if all of them do nothing.

    Raises:
        ConfigurationError: A value is not valid.
    """

    timeout: float | None = None
    start_timeout: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    forward_env: tuple[str, ...] = FORWARDED
    ship: tuple[Path, ...] = ()
    logs: Logs = "all"
    spark: SparkSession | None = None
    launcher: LauncherKind = "fast"
    torchrun_args: tuple[str, ...] = ()
    idle_timeout: float = 600.0
    environment: Path | tuple[str, ...] | None = None
    resources: ResourceProfile | None = None
    ports: range | None = None
    logs_json: Path | None = None
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    log_time: bool = False
    status: bool | None = None
    max_restarts: int = 0
    restart_on: tuple[type[BaseException] | int, ...] | None = None
    no_restart_on: tuple[type[BaseException] | int, ...] = ()
    max_preemptions: int | None = None
    min_processes: int | None = None
    resize_wait: float = 30.0
    grow: bool = False
    stall_timeout: float | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "stall_timeout"):
            if getattr(self, name) is not None:
                self._set(name, validation.duration(name, getattr(self, name)))
        self._set("start_timeout", validation.duration("start_timeout", self.start_timeout))
        self._set("idle_timeout", validation.duration("idle_timeout", self.idle_timeout))
        self._set("resize_wait", validation.duration("resize_wait", self.resize_wait, or_none_at_all=True))
        self._set("env", validation.environment(self.env))
        self._set("forward_env", validation.strings("forward_env", self.forward_env))
        self._set("ship", validation.paths(self.ship))
        self._set("torchrun_args", validation.strings("torchrun_args", self.torchrun_args))
        self._set("environment", validation.packages(self.environment))
        self._set("ports", validation.port_range(self.ports))
        self._set("logs_json", validation.file_to_write(self.logs_json))
        for name in ("stdout", "stderr"):
            validation.stream(name, getattr(self, name))
        validation.check_bool("log_time", self.log_time)
        validation.check_bool("grow", self.grow)
        validation.optional_bool("status", self.status)
        self._check_restarts()
        validation.check_kind("spark", self.spark, "SparkSession", "pyspark.sql")
        validation.check_kind("resources", self.resources, "ResourceProfile", "pyspark.resource")
        validation.check_choice("logs", self.logs, ("all", "rank0", "none"))
        validation.check_choice("launcher", self.launcher, ("fast", "torchrun"))
        if self.torchrun_args and self.launcher != "torchrun":
            raise ConfigurationError('torchrun_args needs launcher="torchrun"')

    @property
    def keep(self) -> float:
        """Seconds within which another attempt starts on the nodes that are left, if one may; 0 if not."""
        if not self.max_restarts and self.max_preemptions == 0 and not self.grow:
            return 0.0
        return self.start_timeout + self.resize_wait + _MARGIN

    def _check_restarts(self) -> None:
        self._set("max_restarts", validation.integer("max_restarts", self.max_restarts, at_least=0))
        if self.max_preemptions is not None:
            count = validation.integer("max_preemptions", self.max_preemptions, at_least=0)
            self._set("max_preemptions", count)
        if self.restart_on is not None:
            self._set("restart_on", validation.causes("restart_on", self.restart_on))
        self._set("no_restart_on", validation.causes("no_restart_on", self.no_restart_on))
        if self.min_processes is not None:
            count = validation.integer("min_processes", self.min_processes, at_least=1)
            self._set("min_processes", count)
        if self.grow and self.min_processes is None:
            raise ConfigurationError("grow=True needs min_processes, the least number of ranks to start with")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Makes settings from keyword arguments, refusing unknown names.

        Raises:
            ConfigurationError: A name is unknown or a value is not valid.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigurationError(f"unknown setting {unknown[0]!r}; there are: {', '.join(known)}")
        return cls(**values)
