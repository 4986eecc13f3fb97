"""A list of requirements, resolved once on the driver and packed into an archive."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

from sparkdist.driver.local import own_folder
from sparkdist.errors import ConfigurationError

_LAST_LINES = 15
_LOCK = threading.Lock()
_PACKED: dict[tuple[str, ...], Path] = {}


def resolve(requirements: tuple[str, ...]) -> Path:
    """Returns an archive with the packages that a list of requirements means, and what they require.

    It is made once in the life of this process: what is not pinned must not grow old unseen.

    Args:
        requirements: Lines as a requirements file has them, options such as `--index-url` too.

    Raises:
        ConfigurationError: pip could not install them.
    """
    with _LOCK:  # threads that ask for the same wait for the first
        archive = _PACKED.get(requirements)
        if archive is None or not archive.exists():
            archive = _PACKED[requirements] = _resolve(requirements)
        return archive


def _resolve(requirements: tuple[str, ...]) -> Path:
    # How many, not which: an index's address may hold a password.
    print(
        f"sparkdist: resolving environment= ({len(requirements)} lines) by pip ...",
        file=sys.stderr,
        flush=True,
    )
    home = own_folder(os.getpid())
    with tempfile.TemporaryDirectory(dir=home) as folder:
        listed, packages = Path(folder, "requirements.txt"), Path(folder, "packages")
        # A file, not arguments: everybody sees those.
        listed.write_text("\n".join(requirements) + "\n")
        _pip("--target", str(packages), "--requirement", str(listed))
        fd, archive = tempfile.mkstemp(".tar.gz", "packages-", home)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
            tar.add(packages, ".")
    return Path(archive)


def _pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *args]
    # PIP_USER and the like would send packages elsewhere; a target excludes them.
    environ = {n: v for n, v in os.environ.items() if n not in ("PIP_USER", "PIP_PREFIX", "PIP_TARGET")}
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        raise ConfigurationError(
            f"environment: {sys.executable} -m pip could not install the requirements (code "
            f"{done.returncode}). Its last lines were:\n" + "\n".join(lines[-_LAST_LINES:])
        )
