"""The Python of an environment that was unpacked here: it is made ready, and must run."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from sparkdist.executor.checks import PYTHON
from sparkdist.executor.order import NodeError

_RUN_TIME = 60.0  # s; a cold disk may need some for the first start
_UNPACK_TIME = 1800.0  # s; it goes through every file, and one that is ended in the middle stays damaged
_VERSION = "import sys; print(*sys.version_info[:2], sep='.')"
_ELSEWHERE = (
    "A venv holds links to the Python that it was made with: install that one at the same place on every "
    "executor, or send a conda environment, which holds its own."
)


def make_ready(python: str, label: str, versions: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Sees to it that an environment's interpreter runs here, as the driver's version of Python.

    Args:
        python: The interpreter, `bin/python` in the environment's folder.
        label: What the user calls the environment.
        versions: The driver's versions, by name.
        environ: What it starts with.

    Raises:
        NodeError: It does not run, or is of another version.
    """
    _unpack_conda(python, label, environ)
    found = _run("its Python", [python, "-I", "-c", _VERSION], label, environ, _RUN_TIME)
    wanted = versions.get(PYTHON)
    if wanted and found != wanted:
        link = f" (a link to {os.path.realpath(python)})" if os.path.islink(python) else ""
        raise NodeError(
            f"the environment {label} runs Python {found} on {socket.gethostname()}{link}, the driver runs "
            f"{wanted}. Make it with Python {wanted}, and see that executors have what a venv links to."
        )


def _unpack_conda(python: str, label: str, environ: Mapping[str, str]) -> None:
    """Has conda's own script put this place into the files that name the place of the packing."""
    script = Path(python).with_name("conda-unpack")
    done = script.with_name(".sparkdist-unpacked")
    if done.exists() or not script.exists():
        return
    fd = os.open(script.parent, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # servers of several kinds may start at once
        if not done.exists():
            _run("its conda-unpack", [python, str(script)], label, environ, _UNPACK_TIME)
            done.touch()
    finally:
        os.close(fd)


def _run(what: str, command: list[str], label: str, environ: Mapping[str, str], seconds: float) -> str:
    environ = {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(command, env=environ, cwd="/", capture_output=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            return done.stdout.decode(errors="replace").strip()
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"code {done.returncode}"
    raise NodeError(
        f"the environment {label} cannot be used on {socket.gethostname()}: {what} does not run in "
        f"{os.path.realpath(command[0])} ({reason}). {_ELSEWHERE}"
    )
