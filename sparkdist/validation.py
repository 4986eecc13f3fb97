"""Checks of what users pass in: each returns a value as the engine wants it, or says what is wrong with it.

Every one raises ConfigurationError.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path

from sparkdist.errors import ConfigurationError

ARCHIVES = (".tar.gz", ".tgz", ".zip")


def integer(name: str, value: object, at_least: float = -math.inf) -> int:
    """Returns `value` as an int if it is an integer, numpy's too, of at least so much (bool is none).

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        least = f" of at least {at_least}" if math.isfinite(at_least) else ""
        raise ConfigurationError(f"{name} must be an integer{least}, not {value!r}")
    return int(value)


def optional_bool(name: str, value: object) -> bool | None:
    """Returns `value` if it is True, False or None.

    Raises:
        ConfigurationError: It is not.
    """
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True, False or None, not {value!r}")
    return value


def check_bool(name: str, value: object) -> None:
    """Checks that `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, not {value!r}")


def stream(name: str, value: object) -> None:
    """Checks that `value`, if it is any, takes text."""
    if value is not None and not callable(getattr(value, "write", None)):
        raise ConfigurationError(f"{name} must be a stream of text, such as an open file, not {value!r}")


def looks_secret(name: str) -> bool:
    """Says whether an environment variable's name looks like a credential's."""
    return bool(re.search("TOKEN(?!IZERS)|SECRET|PASSW|KEY|CREDENTIAL", name.upper()))


def duration(name: str, value: object, or_none_at_all: bool = False) -> float:
    """Returns `value` as seconds, more than 0, or 0 too if there may be none at all."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a number of seconds, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not (0 < seconds <= threading.TIMEOUT_MAX or (or_none_at_all and seconds == 0)):  # NaN neither
        least = "at least 0" if or_none_at_all else "more than 0"
        raise ConfigurationError(
            f"{name} must be {least} and at most {threading.TIMEOUT_MAX:.0f} seconds, not {value!r}"
        )
    return seconds


def environment(value: object) -> dict[str, str]:
    """Returns a copy of `env` if it can be an environment."""
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


def strings(name: str, value: object) -> tuple[str, ...]:
    """Returns strings as a tuple; one string alone is none."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{name} must be a list of strings, not {value!r}")
    items = tuple(value)
    for item in items:
        if not isinstance(item, str):
            raise ConfigurationError(f"{name} must hold strings, not {item!r}")
    return items


def paths(value: object) -> tuple[Path, ...]:
    """Returns the absolute paths of `ship`, if all are there and no two share a name."""
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


def packages(value: object) -> Path | tuple[str, ...] | None:
    """Checks `environment`: an archive that is there, or requirements."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        requirements = strings("environment", value)
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


def port_range(value: object) -> range | None:
    """Returns `ports` as a range."""
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


def file_to_write(value: object) -> Path | None:
    """Returns the absolute path of `logs_json`, in a folder that is there."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"logs_json must be the path of a file, not {value!r}")
    path = Path(os.path.abspath(value))
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigurationError(f"logs_json: {str(value)!r} is not a file in a folder that is there")
    return path


def check_kind(setting: str, value: object, name: str, package: str) -> None:
    """Checks that a value is None or of a class, by its name: none of these is worth an import here."""
    # A session is a classic or a Connect one.
    kinds = [kind for kind in type(value).__mro__ if kind.__name__ == name]
    if value is not None and not any(kind.__module__.startswith(package) for kind in kinds):
        raise ConfigurationError(f"{setting} must be a {name}, not a {type(value).__name__}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Checks that a value is one of those there are."""
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def causes(name: str, value: object) -> tuple[type[BaseException] | int, ...]:
    """Returns exception types and exit codes as a tuple."""
    if isinstance(value, (str, bytes, type)) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{name} must be a list of exception types and exit codes, not {value!r}")
    items = tuple(value)
    for item in items:
        is_type = isinstance(item, type) and issubclass(item, BaseException)
        is_code = isinstance(item, Integral) and not isinstance(item, bool) and -64 <= int(item) <= 255
        if not is_type and not is_code:
            raise ConfigurationError(
                f"{name} must hold exception types and exit codes (of a signal its negative number), not "
                f"{item!r}"
            )
    return tuple(item if isinstance(item, type) else int(item) for item in items)
