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

    def __post_init__(self) -> None:
        if self.timeout is not None:
            self._set("timeout", _seconds("timeout", self.timeout))
        self._set("start_timeout", _seconds("start_timeout", self.start_timeout))
        self._set("idle_timeout", _seconds("idle_timeout", self.idle_timeout))
        self._set("env", _environment(self.env))
        self._set("forward_env", _strings("forward_env", self.forward_env))
        self._set("ship", _paths(self.ship))
        self._set("torchrun_args", _strings("torchrun_args", self.torchrun_args))
        _check_session(self.spark)
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


def _check_session(value: object) -> None:
    # By name: a session is a classic or a Connect one, and neither is worth an import here.
    kinds = [kind for kind in type(value).__mro__ if kind.__name__ == "SparkSession"]
    if value is not None and not any(kind.__module__.startswith("pyspark.sql") for kind in kinds):
        raise ConfigurationError(f"spark must be a SparkSession, not a {type(value).__name__}")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
