"""The archive of a Python environment: what is in it, how it is sent, how it is unpacked here."""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from sparkdist.driver.local import own_folder
from sparkdist.driver.session import is_connect
from sparkdist.errors import ConfigurationError, PreflightError
from sparkdist.validation import ARCHIVES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PYTHONS = ("bin/python", "bin/python3")
_DAMAGES = (tarfile.TarError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
_LOCK = threading.Lock()
_SENT: set[tuple[str, str]] = set()  # (application or Connect session, name)


@dataclass(frozen=True)
class Content:
    """What an archive holds.

    Attributes:
        name: A name that no other content has.
        python: Path of the interpreter within it, or "".
        versions: The versions of Python that it has packages for, such as "3.11".
    """

    name: str
    python: str
    versions: frozenset[str]


@dataclass(frozen=True)
class _Member:
    name: str
    is_link: bool
    target: str = ""  # of a hard link, which is another member


def examine(path: Path) -> Content:
    """Looks an archive through, once as long as it stays the same file.

    Raises:
        ConfigurationError: It cannot be read, is damaged, or would put files outside of its folder.
    """
    try:
        status = path.stat()
        return _examine(path, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ConfigurationError(
            f"environment: cannot read {str(path)!r}: {error.strerror or error}"
        ) from error


@lru_cache(maxsize=32)
def _examine(path: Path, _inode: int, _size: int, _mtime: int) -> Content:
    links, names = set(), set()
    try:
        for member in _zip_members(path) if path.suffix == ".zip" else _tar_members(path):
            _check(path, member)
            name = _normal(member.name)
            if name in links:  # a file of that name would be written where the link leads
                raise ConfigurationError(f"environment: {str(path)!r} holds {name!r} again behind a link")
            names.add(name)
            # A hard link to a symbolic one is one as well.
            if member.is_link or (member.target and _normal(member.target) in links):
                links.add(name)
    except _DAMAGES as error:
        raise ConfigurationError(
            f"environment: {str(path)!r} is damaged or not an archive ({type(error).__name__}: {error}). "
            "Pack it again."
        ) from error
    through = next((n for n in names if any(str(p) in links for p in PurePosixPath(n).parents)), None)
    if through:
        raise ConfigurationError(f"environment: {str(path)!r} holds {through!r}, which lies behind a link")
    python = next((name for name in _PYTHONS if name in names), "")
    if path.suffix == ".zip" and python in links:
        raise ConfigurationError(
            f"environment: {python} is a link in {str(path)!r}, and Spark unpacks no links from a zip. Pack "
            "it as .tar.gz."
        )
    with path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    libraries = [PurePosixPath(name).parts[1] for name in names if name.startswith("lib/python")]
    versions = frozenset(library.removeprefix("python") for library in libraries)
    return Content(f"sparkdist-environment-{digest[:32]}", python, versions)


def _tar_members(path: Path) -> Iterator[_Member]:
    with tarfile.open(path, "r:gz") as tar:
        for info in tar:
            if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                raise ConfigurationError(f"environment: {str(path)!r} holds the device {info.name!r}")
            yield _Member(info.name, info.issym(), info.linkname if info.islnk() else "")
        while tar.fileobj and tar.fileobj.read(1 << 20):
            pass  # up to the checksum, which lies behind the last member


def _zip_members(path: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as parts:
        for info in parts.infolist():
            yield _Member(info.filename, (info.external_attr >> 28) == 0o12)  # S_IFLNK


def _check(path: Path, member: _Member) -> None:
    for name in (member.name, member.target):
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ConfigurationError(
                f"environment: {str(path)!r} holds {name!r}, which would lead out of its folder"
            )


def _normal(name: str) -> str:
    return str(PurePosixPath(name))


def send(session: SparkSession, archive: Path, name: str) -> None:
    """Has Spark bring an archive to every executor, once per application (on Connect, per session).

    Args:
        session: The session.
        archive: The file.
        name: Its content's name; executors find it unpacked below Spark's folder of files, as this.

    Raises:
        PreflightError: Spark could not.
    """
    where = session.session_id if is_connect(session) else session.sparkContext.applicationId  # type: ignore[attr-defined]
    with _LOCK:
        if (where, name) in _SENT:
            return
        # Spark knows files by their base name, and refuses another file of the same name.
        suffix = next(ending for ending in ARCHIVES if archive.name.endswith(ending))
        link = own_folder(os.getpid()) / f"{name}{suffix}"
        link.unlink(missing_ok=True)
        link.symlink_to(archive)
        try:
            if is_connect(session):
                session.addArtifact(f"{link}#{name}", archive=True)
            else:
                session.sparkContext.addArchive(f"{link}#{name}")
        except Exception as error:
            raise PreflightError(f"Spark could not send the environment {str(archive)!r}: {error}") from error
        _SENT.add((where, name))


def unpacked(archive: Path, name: str) -> Path:
    """Unpacks an archive for ranks on the driver, once; returns the folder.

    Raises:
        PreflightError: It cannot be unpacked.
    """
    home = own_folder(os.getpid())
    folder = home / name
    with _LOCK:
        if not folder.exists():
            fresh = Path(tempfile.mkdtemp(dir=home))
            try:
                _unpack(archive, fresh)
                fresh.rename(folder)
            except OSError as error:
                shutil.rmtree(fresh, ignore_errors=True)
                raise PreflightError(
                    f"the environment {str(archive)!r} cannot be unpacked: {error}"
                ) from error
    return folder


def _unpack(path: Path, folder: Path) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as parts:
            for info in parts.infolist():  # extractall would make nothing executable
                target = parts.extract(info, folder)
                if not info.is_dir():
                    os.chmod(target, 0o700 if info.external_attr >> 16 & 0o111 else 0o600)
        return
    with tarfile.open(path, "r:gz") as tar:
        # Its members have been checked; the stricter filters refuse the links of a venv.
        tar.extraction_filter = lambda member, _: member
        tar.extractall(folder)
