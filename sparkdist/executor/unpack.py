"""Unpacks what travels as files, on the executor's side."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from pathlib import Path, PurePosixPath


def unpack(data: bytes, folder: Path) -> None:
    """Unpacks a parcel.

    Folders become 0700 and files 0600, or 0700 where they were executable. Nothing that exists is
    overwritten.

    Args:
        data: A zip, or nothing.
        folder: Where to; it is made if it does not exist.

    Raises:
        ValueError: A name in the zip would lead out of the folder; nothing was unpacked.
        FileExistsError: A file exists already.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not data:
        return
    with zipfile.ZipFile(io.BytesIO(data)) as parcel:
        targets = [(info, _target(info.filename, folder)) for info in parcel.infolist()]
        for info, target in targets:
            if info.is_dir():
                _make_folders(target, folder)
                continue
            _make_folders(target.parent, folder)
            executable = (info.external_attr >> 16) & 0o111
            # O_EXCL follows no link that somebody may have put there.
            opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700 if executable else 0o600)
            with os.fdopen(opened, "wb") as out, parcel.open(info) as source:
                shutil.copyfileobj(source, out)


def _target(name: str, folder: Path) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"the parcel holds {name!r}, which would lead out of its folder")
    return folder / path


def _make_folders(target: Path, folder: Path) -> None:
    # mkdir(parents=True) would give the parents the default mode.
    for parent in reversed([target, *target.parents]):
        if parent.is_relative_to(folder) and parent != folder:
            parent.mkdir(mode=0o700, exist_ok=True)
