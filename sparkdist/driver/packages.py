"""The environment that ranks get, and what of the driver's packages they need in it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdist.driver import requirements
from sparkdist.driver.archive import examine, send, unpacked
from sparkdist.errors import ConfigurationError, PreflightError
from sparkdist.executor.checks import CLOUDPICKLE, PYTHON, version_of
from sparkdist.executor.order import Order, Packages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def equip(
    order: Order,
    environment: Path | tuple[str, ...] | None,
    session: SparkSession | None,
    distribution: str | None,
    modules: tuple[str, ...],
) -> tuple[Order, Path | None]:
    """Brings the environment to where ranks will run, and has the order say what they need there.

    Args:
        order: The order so far.
        environment: The setting.
        session: Whose executors will run the ranks; None for the driver.
        distribution: The framework's package.
        modules: Installed modules that the user's code imports on its way to its first line.

    Returns:
        The order, and on the driver the folder in which the environment was unpacked.

    Raises:
        ConfigurationError: The archive is none, holds no Python, or pip could not install something.
        PreflightError: It is of another version of Python than the driver, or could not be sent.
    """
    folder = None
    if environment is not None:
        archive, packages = _prepare(environment)
        order = replace(order, packages=packages)
        if session:
            send(session, archive, packages.name)
        else:
            folder = unpacked(archive, packages.name)
    elif session is None:
        return order, None  # ranks have the driver's own
    return replace(order, versions=_versions(distribution), modules=modules), folder


def _prepare(setting: Path | tuple[str, ...]) -> tuple[Path, Packages]:
    """Resolves requirements, or looks an archive through; returns it with what an order says of it."""
    path = requirements.resolve(setting) if isinstance(setting, tuple) else setting
    content = examine(path)
    if isinstance(setting, tuple):
        return path, Packages(name=content.name, label="that environment= lists", python="")
    label = repr(str(path))
    if not content.python:
        raise ConfigurationError(
            f"environment: {label} holds no bin/python at its top, so it is no packed environment. Make one "
            "with venv-pack or conda-pack, or pass a list of requirements."
        )
    driver = version_of(PYTHON)
    if content.versions and driver not in content.versions:
        raise PreflightError(
            f"the environment {label} holds packages for Python {', '.join(sorted(content.versions))}, the "
            f"driver runs {driver}. Make it with Python {driver}."
        )
    return path, Packages(name=content.name, label=label, python=content.python)


def _versions(distribution: str | None) -> dict[str, str]:
    """Returns the versions that nodes must have too, as far as the driver has them."""
    importlib.import_module("pyspark.cloudpickle")
    names = [PYTHON, *([distribution] if distribution else []), "pyspark", CLOUDPICKLE]
    found = {name: version_of(name) for name in names}
    return {name: version for name, version in found.items() if version}
