"""The Horovod that is installed: which extensions it has, for what they were built, whether they work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from sparkdist.horovod.build.diagnosis import Diagnosis, diagnose
from sparkdist.horovod.build.toolchain import installed_frameworks

STAMP = "sparkdist.json"  # in the wheel's dist-info
_EXTENSIONS = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib", "mxnet": "mpi_lib"}
_METADATA_NAMES = {"torch": "pytorch"}
_BACKENDS = ("gloo", "mpi", "nccl", "cuda")
_LIMIT = 300  # s for an import

_PROBE = """
import importlib, json, sys
module = importlib.import_module("horovod." + sys.argv[1])
print("sparkdist:" + json.dumps({name: bool(getattr(module, name + "_built")()) for name in sys.argv[2:]}))
"""


@dataclass(frozen=True)
class Installed:
    """An installed Horovod, as its files tell.

    Attributes:
        version: Its version.
        folder: The folder of the package.
        stamp: What `sparkdist horovod build` left in the wheel; empty if something else built it.
        extensions: The frameworks that it has an extension for.
    """

    version: str
    folder: Path
    stamp: Mapping[str, Any]
    extensions: tuple[str, ...]
    stamped_at: int = 0

    @property
    def complete(self) -> bool:
        """Whether each extension that our build made is there still."""
        return set(self.stamp.get("frameworks", ())) <= set(self.extensions)


def installed() -> Installed | None:
    """Returns the Horovod of this interpreter, or None."""
    try:
        found = distribution("horovod")
    except PackageNotFoundError:
        return None
    folder = Path(str(found.locate_file("horovod")))
    extensions = tuple(n for n, stem in _EXTENSIONS.items() if any((folder / n).glob(f"{stem}*.so")))
    stamp = found.read_text(STAMP)
    return Installed(
        found.version, folder, json.loads(stamp) if stamp else {}, extensions, _written(found) if stamp else 0
    )


def _written(found: Distribution) -> int:
    stamp = next(file for file in found.files or () if file.name == STAMP)
    return os.stat(str(found.locate_file(stamp))).st_mtime_ns


@dataclass(frozen=True)
class Extension:
    """An extension of Horovod.

    Attributes:
        framework: The framework it is for.
        built: Whether it is there.
        built_for: The framework's version it was built against.
        now: The framework's version now, or "" if that is not installed.
        works: Whether it loads.
        backends: What it was built with, as Horovod says.
        problem: What is wrong, or None.
    """

    framework: str
    built: bool
    built_for: str
    now: str
    works: bool = False
    backends: Mapping[str, bool] = field(default_factory=dict)
    problem: Diagnosis | None = None


@dataclass(frozen=True)
class Report:
    """What `sparkdist horovod check` tells.

    Attributes:
        python: This interpreter.
        version: Horovod's version, or "" if it is not installed.
        built_for: What the wheel's stamp says of interpreter and compiler; empty if it has none.
        extensions: One for each framework that is installed or has an extension.
        problem: What is wrong with the whole, or None.
    """

    python: str
    version: str
    built_for: Mapping[str, str]
    extensions: tuple[Extension, ...]
    problem: Diagnosis | None = None

    @property
    def works(self) -> bool:
        """Whether at least one framework's extension works."""
        return any(extension.works for extension in self.extensions)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        return {**asdict(self), "works": self.works}


def examine() -> Report:
    """Looks at the installed Horovod, and loads each extension in an interpreter of its own."""
    found, frameworks = installed(), installed_frameworks()
    if found is None:
        missing = diagnose("ModuleNotFoundError: No module named 'horovod'")
        return Report(sys.executable, "", {}, (), missing)
    names = [name for name in _EXTENSIONS if name in frameworks or name in found.extensions]
    extensions = tuple(_extension(name, found, frameworks.get(name, "")) for name in names)
    built_for = {name: str(found.stamp[name]) for name in ("python", "compiler") if name in found.stamp}
    nothing = None if extensions else diagnose("No module named 'torch'")
    return Report(sys.executable, found.version, built_for, extensions, nothing)


def _extension(name: str, found: Installed, now: str) -> Extension:
    if name not in found.extensions:
        # Of what nobody asked for, the absence is no problem.
        wanted = name == "torch" or name in found.stamp.get("frameworks", ())
        problem = diagnose(f"Extension horovod.{name} has not been built") if wanted else None
        return Extension(name, False, "", now, problem=problem)
    built_for = _built_for(name, found)
    if not now:
        return Extension(name, True, built_for, now, problem=diagnose(f"No module named '{name}'"))
    backends, error = _load(name)
    problem = (
        diagnose(error) or Diagnosis(error[-400:], ("sparkdist horovod build --rebuild",)) if error else None
    )
    if built_for and built_for != now:
        was = f"Framework {name} installed with version {built_for} but found version {now}\n"
        problem = diagnose(was)
    return Extension(name, True, built_for, now, not error, backends, problem)


def _built_for(name: str, found: Installed) -> str:
    """Returns what Horovod's own build wrote down."""
    file = found.folder / "metadata.json"
    known: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    return known.get(_METADATA_NAMES.get(name, name), "")


def _load(name: str) -> tuple[dict[str, bool], str]:
    """Imports an extension; returns what it was built with, and the error's last line if there was one."""
    command = [sys.executable, "-c", _PROBE, name, *_BACKENDS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, errors="replace")
    except subprocess.TimeoutExpired:
        return {}, f"import horovod.{name} takes longer than {_LIMIT} s"
    for line in done.stdout.splitlines():
        if line.startswith("sparkdist:"):
            return json.loads(line.removeprefix("sparkdist:")), ""
    ended = f"import horovod.{name} ended with code {done.returncode}"
    # Horovod's own errors have several lines: all of the last traceback's end.
    return {}, done.stderr.rpartition("Traceback (most recent call last)")[2].strip() or ended
