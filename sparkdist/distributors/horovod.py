"""`run` and `run_elastic`, as in horovod.spark."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from sparkdist.driver.slots import all_slots
from sparkdist.errors import ConfigurationError
from sparkdist.launcher import Launcher
from sparkdist.validation import check_kind, duration, integer

_START_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT"
_ELASTIC_TIMEOUT = "HOROVOD_ELASTIC_TIMEOUT"
_RESETS = 10  # that an elastic run may take unless told otherwise: a bug in the training fails every time
_PATIENCE = 5.0  # s that a gang which may grow later waits before it starts with fewer ranks


def run(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] = {},  # as there; nothing writes to it
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    launcher: Launcher | str = "fast",
    **settings: Any,
) -> list[Any]:
    """Runs `fn` on ranks of real Horovod, as `horovod.spark.run` does, and returns what each returned.

    Collectives go over gloo, those of GPU tensors over NCCL where Horovod was built with it.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks; default: as many as the session has slots.
        start_timeout: Seconds until every rank must have entered the function. Default:
            HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi: None or False: MPI starts nothing here.
        use_gloo: None or True.
        extra_mpi_args: None.
        env: Environment variables for every rank, besides those that it has.
        stdout: Stream on the driver for what ranks write to theirs; default: the driver's own.
        stderr: Likewise.
        verbose: 0 shows no status line, 2 has Horovod log what it does (HOROVOD_LOG_LEVEL=debug).
        nics: Name of the network interface that collectives use; default: the one towards the
            other hosts.
        prefix_output_with_timestamp: Whether each line of output says when it came.
        executable: None: `environment=` says which Python ranks run in.
        launcher: A `Launcher("horovod", ...)` that says all of the above but the function.
        **settings: `local_mode`, `use_gpu` and `ssl_conf` of `sparkdist.Launcher`; see
            `sparkdist.Settings` for the rest.

    Returns:
        What `fn` returned, by rank.

    Raises:
        ConfigurationError: An argument is not valid, or means nothing here; no job was started.
        PreflightError: The session, the cluster or an executor cannot run this.
        TrainingFailed: A rank failed.
        TrainingTimeout: `timeout` or `start_timeout` passed.
        ResultError: A return value could not be brought to the driver.
    """
    _refuse(use_mpi=use_mpi, use_gloo=use_gloo, extra_mpi_args=extra_mpi_args, executable=executable)
    theirs = _settings(env, stdout, stderr, verbose, nics, prefix_output_with_timestamp)
    if start_timeout is not None or _START_TIMEOUT in os.environ:
        theirs["start_timeout"] = _seconds("start_timeout", start_timeout, _START_TIMEOUT)
    if isinstance(launcher, Launcher):
        return _launch(_only(launcher, num_proc, theirs | settings), fn, args, kwargs)
    settings = {**theirs, "launcher": launcher, **settings}
    count = _count(num_proc, settings)
    return _launch(Launcher("horovod", num_processes=count, **settings), fn, args, kwargs)


def run_elastic(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    **settings: Any,
) -> list[Any]:
    """Runs `fn` as `run` does, and starts the ranks again, as many as there are slots for, when one fails.

    All of them are new processes then. What `hvd.elastic` states have committed is there again.

    Args:
        fn: See `run`.
        args: See `run`.
        kwargs: See `run`.
        num_proc: Number of ranks; default: as many as the session has slots.
        min_num_proc: With how few to go on; default: `num_proc`.
        max_num_proc: How many there may be once there are slots for them; default: `num_proc`.
        start_timeout: See `run`.
        elastic_timeout: Seconds to wait for slots for `min_num_proc` when some were lost; the longer one
            of it and `start_timeout` counts. Default: HOROVOD_ELASTIC_TIMEOUT, or 600.
        reset_limit: How many failures start the ranks again; default: 10. Executors that are lost have
            a budget of their own, `max_preemptions`.
        env: See `run`.
        stdout: See `run`.
        stderr: See `run`.
        verbose: See `run`.
        nics: See `run`.
        prefix_output_with_timestamp: See `run`.
        min_np: An old name of `min_num_proc`.
        max_np: An old name of `max_num_proc`.
        **settings: See `run`.

    Returns:
        What `fn` returned, by rank of the last attempt.

    Raises:
        ConfigurationError: An argument is not valid; no job was started.
        PreflightError: The session, the cluster or an executor cannot run this.
        TrainingFailed: A rank failed once too often.
        TrainingTimeout: `timeout` or `start_timeout` passed.
        ResultError: A return value could not be brought to the driver.
    """
    least = _renamed("min_np", min_np, "min_num_proc", min_num_proc)
    most = _renamed("max_np", max_np, "max_num_proc", max_num_proc)
    theirs = _settings(env, stdout, stderr, verbose, nics, prefix_output_with_timestamp)
    theirs["start_timeout"] = max(
        _seconds("start_timeout", start_timeout, _START_TIMEOUT),
        _seconds("elastic_timeout", elastic_timeout, _ELASTIC_TIMEOUT),
    )
    count = _count(num_proc, settings)
    least = count if least is None else integer("min_num_proc", least, at_least=1)
    most = count if most is None else integer("max_num_proc", most, at_least=1)
    if not least <= count <= most:
        raise ConfigurationError(
            f"num_proc={count} must be at least min_num_proc={least} and at most max_num_proc={most}"
        )
    restarts = _RESETS if reset_limit is None else integer("reset_limit", reset_limit, at_least=0)
    theirs |= {"min_processes": least, "grow": least < most, "max_restarts": restarts}
    if least < most:
        theirs["resize_wait"] = _PATIENCE
    return _launch(Launcher("horovod", num_processes=most, **{**theirs, **settings}), fn, args, kwargs)


def _launch(launcher: Launcher, fn: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    if not callable(fn):
        raise ConfigurationError(f"fn must be a function, not {fn!r}")
    return launcher.launch(fn, *args, **kwargs).values


def _refuse(
    *, use_mpi: bool | None, use_gloo: bool | None, extra_mpi_args: str | None, executable: str | None
) -> None:
    """Refuses what asks for another way to start ranks."""
    if use_mpi or extra_mpi_args:
        name = "use_mpi" if use_mpi else "extra_mpi_args"
        raise ConfigurationError(
            f"{name}: ranks are started without MPI. Leave it out: collectives go over gloo, those of GPU "
            "tensors over NCCL."
        )
    if use_gloo not in (None, True):
        raise ConfigurationError("use_gloo=False: ranks are started with gloo alone; leave it out")
    if executable not in (None, sys.executable):
        raise ConfigurationError(
            f"executable={executable!r}: ranks run in the Python of Spark's workers (PYSPARK_PYTHON) "
            "or of a packed environment; pass that as environment="
        )


def _settings(
    env: Mapping[str, str] | None,
    stdout: TextIO | None,
    stderr: TextIO | None,
    verbose: int,
    nics: str | Iterable[str] | None,
    with_time: bool,
) -> dict[str, Any]:
    """Returns the engine's settings for what run and run_elastic share, as far as it was given."""
    found: dict[str, Any] = {}
    ours: dict[str, str] = {}
    level = integer("verbose", int(verbose) if isinstance(verbose, bool) else verbose, at_least=0)
    if level == 0:
        found["status"] = False
    elif level > 1:
        ours["HOROVOD_LOG_LEVEL"] = "debug"
    if nics:
        names = [nics] if isinstance(nics, str) else list(nics)
        if len(names) > 1:
            raise ConfigurationError(f"nics={names!r}: gloo uses one network interface; name that one")
        ours |= {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": names[0]}
    if ours or env:
        found["env"] = {**ours, **(env or {})}
    streams = {"stdout": stdout, "stderr": stderr}
    found |= {name: stream for name, stream in streams.items() if stream is not None}
    if with_time:
        found["log_time"] = with_time
    return found


def _only(launcher: Launcher, num_proc: int | None, others: Mapping[str, Any]) -> Launcher:
    """Returns the launcher that says everything."""
    if num_proc not in (None, launcher.num_processes):
        raise ConfigurationError(f"num_proc={num_proc}: launcher= has num_processes={launcher.num_processes}")
    if others:
        raise ConfigurationError(f"{next(iter(others))}: give it to the Launcher that is launcher=")
    return launcher


def _count(num_proc: int | None, settings: Mapping[str, Any]) -> int:
    if num_proc is not None:
        return integer("num_proc", num_proc, at_least=1)
    if settings.get("local_mode"):
        raise ConfigurationError(
            "num_proc: on the driver (local_mode=True) there are no slots to count; name it"
        )
    spark, resources = settings.get("spark"), settings.get("resources")
    check_kind("spark", spark, "SparkSession", "pyspark.sql")
    check_kind("resources", resources, "ResourceProfile", "pyspark.resource")
    return all_slots(spark, resources, settings.get("use_gpu"))


def _seconds(name: str, value: float | None, variable: str) -> float:
    """Returns a time limit: an argument, or a variable of the driver's."""
    if value is not None:
        return duration(name, value)
    text = os.environ.get(variable, "600")
    try:
        return duration(variable, float(text))
    except ValueError:
        raise ConfigurationError(f"{variable} must be a number of seconds, not {text!r}") from None


def _renamed(old: str, value: int | None, new: str, other: int | None) -> int | None:
    if value is None:
        return other
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)
    if other is not None:
        raise ConfigurationError(f"{old} and {new} are the same; give one of them")
    return value
