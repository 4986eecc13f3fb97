"""Whether this interpreter has what the driver has, before any rank runs in it."""

from __future__ import annotations

import pkgutil
import socket
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

PYTHON, CLOUDPICKLE = "Python", "pyspark's cloudpickle"  # names of versions that are no package's

IMPORTED = ("pyspark", CLOUDPICKLE)  # whose versions show once they are imported: a zip has no metadata


def version_of(name: str) -> str | None:
    """Returns the version of Python, of pyspark's cloudpickle, or of an installed package; None without it.

    A build label such as `+cpu` is left out: builds of one version differ by machine, not by what
    they can read of each other.
    """
    if name == PYTHON:
        return ".".join(map(str, sys.version_info[:2]))
    module = {"pyspark": "pyspark", CLOUDPICKLE: "pyspark.cloudpickle"}.get(name)
    try:
        version = sys.modules[module].__version__ if module else metadata.version(name)
    except (KeyError, AttributeError, metadata.PackageNotFoundError):
        return None
    return str(version).partition("+")[0]


def difference(versions: Mapping[str, str], remedy: str) -> str:
    """Says what of this interpreter differs from the driver's versions, or "".

    Args:
        versions: The driver's, by name.
        remedy: What the user can do, as a sentence.
    """
    for name, wanted in versions.items():
        found = version_of(name)
        if found != wanted:
            what = f"has {name} {found}" if found else f"has no {name}"
            return (
                f"the Python of {socket.gethostname()} ({sys.executable}) {what}, the driver has {name} "
                f"{wanted}. {remedy}"
            )
    return ""


def remedy(environment: str) -> str:
    """Says what to do about a node that lacks what the driver has.

    Args:
        environment: What the user calls the environment that the node's ranks run in; "" for its own.
    """
    if environment:
        return f"Its packages come from the environment {environment}: make that anew with the driver's."
    return (
        "Install the driver's version there, have Spark use a Python that has it (PYSPARK_PYTHON or "
        "spark.pyspark.python), or send the driver's packages with environment=."
    )


def first_missing(modules: Iterable[str], path: list[str]) -> str | None:
    """Returns the first of the modules that cannot be found on `path`, without importing any."""
    before = sys.path[:]
    sys.path[:] = path
    try:
        return next((name for name in modules if not is_there(name)), None)
    finally:
        sys.path[:] = before


def is_there(name: str) -> bool:
    """Says whether there is a module of that name, without importing it or a package that it is in."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return top in sys.modules  # a module that somebody made by hand has no spec
    for end in range(1, len(rest) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = find_in(".".join([top, *rest[:end]]), spec.submodule_search_locations)
    return spec is not None


def find_in(name: str, folders: Iterable[str]) -> ModuleSpec | None:
    """Returns the spec of the module of that full name in one of the folders of its package."""
    # Not PathFinder: it wants the namespace package above to be imported.
    portions: list[str] = []
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(name) if finder else None
        if spec and spec.loader:
            return spec
        portions += (spec and spec.submodule_search_locations) or ()
    if not portions:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = portions
    return spec
