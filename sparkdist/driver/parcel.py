"""What travels to executors as files: code that only the driver has, and what `ship` names.

A parcel is a zip with two folders. `code/` goes on a rank's sys.path: a script, and the modules of
the user's own that a function or script needs. `ship/` holds each thing of `ship` by its base name.
Installed packages do not travel.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from sparkdist.driver import modules
from sparkdist.errors import ConfigurationError

MAX_BYTES = 256 << 20  # of all files in a parcel, before compression
_NOT_CODE = frozenset({"__pycache__", ".git"})


@dataclass(frozen=True)
class Parcel:
    """Files for the ranks.

    Attributes:
        data: A zip; empty if there is nothing to send.
        script: The script's name in the folder `code`, or None for a function.
    """

    data: bytes
    script: str | None = None


def for_function(closure_modules: Collection[str], ship: tuple[Path, ...]) -> Parcel:
    """Packs the user's own modules that a function needs, and those that they import.

    Args:
        closure_modules: What the function refers to, as `Closure.modules` says it.
        ship: Files and folders to send along.

    Raises:
        ConfigurationError: Something cannot be read, or all is larger than `MAX_BYTES`.
    """
    box = _Box()
    _add_modules(box, modules.Finder().needed(closure_modules))
    _add_shipped(box, ship)
    return Parcel(box.data())


def for_script(path: Path, ship: tuple[Path, ...]) -> Parcel:
    """Packs a script, the modules that it imports from its own folder, and those that they import.

    Args:
        path: The script.
        ship: Files and folders to send along.

    Raises:
        ConfigurationError: Something cannot be read, or all is larger than `MAX_BYTES`.
    """
    check_script(path)
    box = _Box()
    box.add(f"code/{path.name}", path)
    # As Python does it for sys.path[0]: the folder of what a link leads to.
    folder = path.resolve().parent
    _add_modules(box, modules.Finder(folder).needed_by(path))
    _add_shipped(box, ship)
    return Parcel(box.data(), path.name)


def check_script(path: Path) -> None:
    """Checks that there is a script.

    Raises:
        ConfigurationError: There is none, it is not a file, or it cannot be read.
    """
    if not path.exists():
        raise ConfigurationError(f"there is no script {str(path)!r}")
    if not path.is_file():
        raise ConfigurationError(f"the script {str(path)!r} is not a file")
    with _readable(path):
        path.open("rb").close()


@cache
def package_zip() -> tuple[str, bytes]:
    """Packs sparkdist itself.

    Returns:
        The SHA-256 of the zip, in hex, and the zip, the same bytes for the same sources. It can
        be put on sys.path as it is, or unpacked.
    """
    files = dict(_sources(resources.files("sparkdist"), "sparkdist"))
    data = _zip({name: (text, 0o600) for name, text in files.items()})
    return sha256(data).hexdigest(), data


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.is_dir() and item.name != "__pycache__":
            yield from _sources(item, f"{name}/{item.name}")
        elif item.name.endswith(".py") or item.name == "py.typed":
            yield f"{name}/{item.name}", item.read_bytes()


def _add_modules(box: _Box, units: Iterator[modules.Unit]) -> None:
    remedy = "Move its data elsewhere and name that in ship=, or install the package on the executors."
    for unit in units:
        name = f"code/{unit.place}"
        for path in unit.paths:
            if path.is_dir():
                box.add_tree(name, path, remedy, skip_caches=True)
            else:
                box.add(name, path, remedy)
        if not unit.paths:
            box.add_folder(name)


def _add_shipped(box: _Box, ship: tuple[Path, ...]) -> None:
    remedy = "Put it on storage that every rank can read."
    for path in ship:
        name = os.path.basename(os.path.abspath(path))
        if not name:
            raise ConfigurationError(f"ship: {str(path)!r} has no name")
        if path.is_dir():
            box.add_tree(f"ship/{name}", path, remedy)
        else:
            box.add(f"ship/{name}", path, remedy)


class _Box:
    """Gathers what goes into a parcel, by its name there; what comes first under a name stays."""

    def __init__(self) -> None:
        self._paths: dict[str, Path | None] = {}  # None: a folder
        self._size = 0

    def add(self, name: str, path: Path, remedy: str = "", whole: Path | None = None) -> None:
        """Adds a file, which may be part of a `whole` folder that an error then names."""
        if name in self._paths:
            return
        with _readable(path):
            self._size += path.stat().st_size
        if self._size > MAX_BYTES:
            raise ConfigurationError(
                f"{str(whole or path)!r} makes the files to send larger than {MAX_BYTES >> 20} MB. {remedy}"
            )
        self._paths[name] = path

    def add_folder(self, name: str) -> None:
        """Adds an empty folder."""
        self._paths.setdefault(f"{name}/", None)

    def add_tree(self, name: str, folder: Path, remedy: str, skip_caches: bool = False) -> None:
        """Adds a folder with all in it; links are followed."""
        self.add_folder(name)
        for path, inner in _walk(folder, skip_caches):
            if path.is_dir():
                self.add_folder(f"{name}/{inner}")
            else:
                self.add(f"{name}/{inner}", path, remedy, folder)

    def data(self) -> bytes:
        """Returns the zip, or nothing if nothing was added."""
        entries: dict[str, tuple[bytes, int]] = {}
        for name, path in self._paths.items():
            if path is None:
                entries[name] = b"", 0o700
                continue
            with _readable(path):
                entries[name] = path.read_bytes(), path.stat().st_mode
        return _zip(entries) if entries else b""


def _walk(folder: Path, skip_caches: bool, above: tuple[str, ...] = ()) -> Iterator[tuple[Path, str]]:
    real = os.path.realpath(folder)
    if real in above:
        return  # a link back to where we came from
    with _readable(folder):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        if skip_caches and (entry.name in _NOT_CODE or entry.name.endswith(".pyc")):
            continue
        if entry.is_dir():
            yield Path(entry.path), entry.name
            for path, inner in _walk(Path(entry.path), skip_caches, (*above, real)):
                yield path, f"{entry.name}/{inner}"
        elif entry.is_file():  # no sockets, pipes or links to nothing
            yield Path(entry.path), entry.name


def _zip(entries: Mapping[str, tuple[bytes, int]]) -> bytes:
    file = io.BytesIO()
    # A fast level: the bytes cross one network and are thrown away.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
        for name, (content, mode) in sorted(entries.items()):
            info = zipfile.ZipInfo(name)  # of 1980, so that equal contents make equal bytes
            kind = stat.S_IFDIR if name.endswith("/") else stat.S_IFREG
            info.external_attr = (kind | stat.S_IMODE(mode)) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            try:
                out.writestr(info, content)
            except UnicodeEncodeError:
                raise ConfigurationError(f"the file name {name!r} is not valid UTF-8") from None
    return file.getvalue()


class _readable:
    """Turns an error of the file system into one that names the path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise ConfigurationError(f"cannot read {str(self._path)!r}: {error.strerror}") from error
