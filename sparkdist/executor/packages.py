"""What an environment that travels changes for a node's ranks: interpreter, variables, path."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from sparkdist.executor.order import NodeError, Packages


def folder_of(packages: Packages | None, root: Path) -> Path | None:
    """Returns where an environment was unpacked, below the folder in which its kind is put.

    Raises:
        NodeError: It is not there.
    """
    if packages is None:
        return None
    folder = root / packages.name
    if not folder.is_dir():
        raise NodeError(f"the environment {packages.label} has not reached this executor: no folder {folder}")
    return folder


def interpreter(packages: Packages | None, folder: Path | None) -> str:
    """Returns the interpreter for ranks: the environment's, or this process's."""
    return str(folder / packages.python) if packages and folder and packages.python else sys.executable


def environ(packages: Packages | None, folder: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """Returns a node's variables as its ranks, and what they start, shall have them."""
    changed = dict(given)
    if packages is None or folder is None:
        return changed
    if not packages.python:
        changed["PYTHONPATH"] = _joined(folder, given.get("PYTHONPATH"))
        return changed
    # What is named there would win over the environment's own packages.
    for name in ("PYTHONPATH", "PYTHONHOME"):
        changed.pop(name, None)
    changed["PATH"] = _joined(folder / "bin", given.get("PATH", os.defpath))
    return changed


def path(packages: Packages | None, folder: Path | None, given: Iterable[str]) -> tuple[str, ...]:
    """Returns what of this process's sys.path ranks shall have.

    With an interpreter of the environment's own, that interpreter's comes before it.
    """
    if packages is None or folder is None:
        return tuple(given)
    if not packages.python:
        return (str(folder), *given)
    return tuple(entry for entry in given if entry not in _own_path())


def _joined(first: Path, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else str(first)


@cache
def _own_path() -> frozenset[str]:
    """Returns what this interpreter has on sys.path by itself: its standard library and packages."""
    library = Path(sysconfig.get_path("stdlib"))
    zipped = library.parent / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    packages = site.getsitepackages([sys.prefix, sys.base_prefix])
    return frozenset(
        map(str, (library, library / "lib-dynload", zipped, *packages, site.getusersitepackages()))
    )
