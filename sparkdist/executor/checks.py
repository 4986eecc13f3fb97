"""Whether this interpreter has what the driver has, before any rank runs in it."""

from __future__ import annotations

import os
import pkgutil
import socket
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

PYTHON, CLOUDPICKLE = "Python", "pyspark's cloudpickle"  # names of versions that are no package's
_MODULES = {"pyspark": "pyspark", CLOUDPICKLE: "pyspark.cloudpickle"}


def version_of(name: str) -> str | None:
    """Returns the version of Python, of pyspark's cloudpickle, or of an installed package; None without it.

    A build label such as `+cpu` is left out: builds of one version differ by machine, not by what
    they can read of each other.
    """
    if name == PYTHON:
        return ".".join(map(str, sys.version_info[:2]))
    # pyspark by the module: Spark delivers it as a zip, beside whatever is installed.
    version = None if name in _MODULES else installed_version(name)
    version = version or getattr(sys.modules.get(_MODULES.get(name, name)), "__version__", None)
    return str(version).partition("+")[0] if version else None


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed package, or None.

    Zips on the path are passed over: importlib.metadata keeps those that it looked into open, and
    this runs in Spark's own Python workers, which are to be left as they were.
    """
    folders = [entry for entry in sys.path if not os.path.isfile(entry)]
    found = next(iter(metadata.distributions(name=distribution, path=folders)), None)
    return found.version if found else None


def difference(versions: Mapping[str, str], remedy: str) -> str:
    """Says what of this interpreter differs from the driver's versions, or "".

    What is there but does not say its version, or not before it is imported, counts as equal.

    Args:
        versions: The driver's, by name.
        remedy: What the user can do, as a sentence.
    """
    for name, wanted in versions.items():
        found = version_of(name)
        if found == wanted or (not found and not missing_part(_MODULES.get(name, name))):
            continue
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
    """Returns the first module that cannot be found on `path`, or the package it is in if that cannot."""
    before = sys.path[:]
    sys.path[:] = path
    try:
        return next(filter(None, map(missing_part, modules)), None)
    finally:
        sys.path[:] = before


def missing_part(name: str) -> str | None:
    """Returns the first of a module's packages and itself that cannot be found; imports none of them."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None if top in sys.modules else top  # made by hand, it has no spec
    for part in rest:
        if spec is None:
            return top
        top = f"{top}.{part}"
        spec = find_in(top, spec.submodule_search_locations or ())
    return None if spec else top


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
