"""Every setting of the engine, defined once.

The front doors and `Launcher` take these as keyword arguments and pass them through;
`Settings` checks them when it is made, on the driver, before any job.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from sparkdist.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

FORWARDED = (
    "NCCL_*",
    "GLOO_*",
    "TORCH_*",
    "PYTORCH_*",
    "OMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "KMP_*",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "PYTHONFAULTHANDLER",
    "TOKENIZERS_PARALLELISM",
)

ARCHIVES = (".tar.gz", ".tgz", ".zip")

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
    status: bool | None


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
        logs_json: A file on the driver that gets what ranks say through Python's logging, one JSON
            object per line.
        status: Whether one line on the terminal or in the notebook says how far the run is, as
            long as it lasts; None for wherever somebody can see it.

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
    status: bool | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None:
            self._set("timeout", _seconds("timeout", self.timeout))
        self._set("start_timeout", _seconds("start_timeout", self.start_timeout))
        self._set("idle_timeout", _seconds("idle_timeout", self.idle_timeout))
        self._set("env", _environment(self.env))
        self._set("forward_env", _strings("forward_env", self.forward_env))
        self._set("ship", _paths(self.ship))
        self._set("torchrun_args", _strings("torchrun_args", self.torchrun_args))
        self._set("environment", _packages(self.environment))
        self._set("ports", _ports(self.ports))
        self._set("logs_json", _log_file(self.logs_json))
        optional_bool("status", self.status)
        _check_kind("spark", self.spark, "SparkSession", "pyspark.sql")
        _check_kind("resources", self.resources, "ResourceProfile", "pyspark.resource")
        _one_of("logs", self.logs, ("all", "rank0", "none"))
        _one_of("launcher", self.launcher, ("fast", "torchrun"))
        if self.torchrun_args and self.launcher != "torchrun":
            raise ConfigurationError('torchrun_args needs launcher="torchrun"')

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


def positive_int(name: str, value: object) -> int:
    """Returns `value` as an int if it is an integer, numpy's too, of at least 1 (bool is none).

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name} must be an integer of at least 1, not {value!r}")
    return int(value)


def optional_bool(name: str, value: object) -> bool | None:
    """Returns `value` if it is True, False or None.

    Raises:
        ConfigurationError: It is not.
    """
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True, False or None, not {value!r}")
    return value


def looks_secret(name: str) -> bool:
    """Says whether an environment variable's name looks like a credential's."""
    return bool(re.search("TOKEN(?!IZERS)|SECRET|PASSW|KEY|CREDENTIAL", name.upper()))


def _seconds(name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a number of seconds, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0 < seconds <= threading.TIMEOUT_MAX:  # false of NaN, too
        raise ConfigurationError(
            f"{name} must be more than 0 and at most {threading.TIMEOUT_MAX:.0f} seconds, not {value!r}"
        )
    return seconds


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"env must be a mapping of names to strings, not {type(value).__name__}")
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigurationError(f"env: {name!r} is not a name for an environment variable")
        if not isinstance(text, str) or "\0" in text:
            # The value is not shown: it may be a secret.
            raise ConfigurationError(
                f"env: the value of {name} must be a string without NUL, not {type(text).__name__}"
            )
    return dict(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{name} must be a list of strings, not {value!r}")
    items = tuple(value)
    for item in items:
        if not isinstance(item, str):
            raise ConfigurationError(f"{name} must hold strings, not {item!r}")
    return items


def _paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Iterable):
        raise ConfigurationError(f"ship must be a list of files and folders, not {value!r}")
    paths: list[Path] = []
    for item in value:
        if not isinstance(item, (str, os.PathLike)):
            raise ConfigurationError(f"ship must hold paths, not {item!r}")
        path = Path(os.path.abspath(item))  # without "..": ranks find it by its last part
        if not path.exists() or not path.name:
            raise ConfigurationError(f"ship: there is no file or folder with a name at {str(item)!r}")
        if path.name in {other.name for other in paths}:
            raise ConfigurationError(
                f"ship: two things are named {path.name!r}; ranks find them by that name"
            )
        paths.append(path)
    return tuple(paths)


def _packages(value: object) -> Path | tuple[str, ...] | None:
    """Checks `environment`: an archive that is there, or requirements."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        requirements = _strings("environment", value)
        if not requirements or not all(item.strip() for item in requirements):
            raise ConfigurationError("environment: the list of requirements, or one of them, is empty")
        return requirements
    path = Path(os.path.abspath(value))
    if not path.name.endswith(ARCHIVES):
        raise ConfigurationError(
            f"environment must be an archive ({', '.join(ARCHIVES)}) or a list of requirements, not {value!r}"
        )
    if not path.is_file():
        raise ConfigurationError(f"environment: there is no file {str(value)!r}")
    return path


def _ports(value: object) -> range | None:
    if value is None:
        return None
    if isinstance(value, range) and value:
        value = f"{value[0]}-{value[-1]}"
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", value.strip()) if isinstance(value, str) else None
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise ConfigurationError(
            f'ports must be a port or a range between 1 and 65535, such as "29500-29600", not {value!r}'
        )
    return range(first, last + 1)


def _log_file(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"logs_json must be the path of a file, not {value!r}")
    path = Path(os.path.abspath(value))
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigurationError(f"logs_json: {str(value)!r} is not a file in a folder that is there")
    return path


def _check_kind(setting: str, value: object, name: str, package: str) -> None:
    # By name: none of these is worth an import here, and a session is a classic or a Connect one.
    kinds = [kind for kind in type(value).__mro__ if kind.__name__ == name]
    if value is not None and not any(kind.__module__.startswith(package) for kind in kinds):
        raise ConfigurationError(f"{setting} must be a {name}, not a {type(value).__name__}")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
