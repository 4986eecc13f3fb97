"""Horovod's released source, and the Python packages that it takes to build it."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparkdist.horovod.build.diagnosis import BuildError
from sparkdist.horovod.build.progress import run_tool

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_BUILD_PACKAGES = ("setuptools", "wheel", "packaging")


def with_tools(folder: Path, log: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Installs into `folder` what a build needs and this interpreter lacks, CMake too.

    Returns:
        The environment in which all of it is found. Builds are not isolated: they have to see the
        framework that they are for.

    Raises:
        BuildError: There is no pip, or it could not install them.
    """
    lacking = [name for name in _BUILD_PACKAGES if not _has(name)]
    if not _has("pip"):
        raise BuildError(f"this Python has no pip: {sys.executable} -m ensurepip")
    env = {**environ}
    cmake = environ.get("HOROVOD_CMAKE") or shutil.which("cmake", path=environ.get("PATH", os.defpath))
    if cmake is None:
        lacking.append("cmake>=3.13")
        cmake = str(folder / "bin" / "cmake")
    if lacking:
        run_tool([*PIP, "install", "--target", folder, *lacking], log, environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environ.get("PYTHONPATH")]))
    return env | {"HOROVOD_CMAKE": cmake}


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def download(number: str, folder: Path, log: Path, environ: Mapping[str, str]) -> Path:
    """Returns the archive of Horovod's version `number` in `folder`, downloaded by pip unless it is there.

    Raises:
        BuildError: pip could not get it.
    """
    archive = folder / f"horovod-{number}.tar.gz"
    if not archive.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        # pip renames a complete file into place.
        flags: list[str | Path] = [
            "--no-deps",
            "--no-binary",
            "horovod",
            "--no-build-isolation",
            "--dest",
            folder,
        ]
        run_tool([*PIP, "download", *flags, f"horovod=={number}"], log, environ)
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks the archive into `folder`; returns the source's root.

    Raises:
        BuildError: The archive is damaged; it is removed, so that the next try gets it again.
    """
    try:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        archive.unlink(missing_ok=True)
        raise BuildError(f"{archive} could not be unpacked and was removed; try again: {error}") from error
    return folder / archive.name.removesuffix(".tar.gz")
