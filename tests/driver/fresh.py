"""A process that knows nothing of the driver: it has the installed packages and a parcel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sparkdist.driver.parcel import package_zip
from sparkdist.executor.unpack import unpack

_CALL = """
import sys
sys.path[:0] = [{code!r}, {library!r}]
from sparkdist import values
function, args, kwargs = values.loads(open({closure!r}, "rb").read())
print(repr(function(*args, **kwargs)))
"""


def call(closure: bytes, parcel: bytes, folder: Path) -> str:
    """Unpacks a parcel and calls a function in a new process; returns what it prints."""
    unpack(parcel, folder / "rank")
    library = folder / "library"
    unpack(package_zip()[1], library)
    (folder / "closure").write_bytes(closure)
    code = _CALL.format(code=str(folder / "rank/code"), library=str(library), closure=str(folder / "closure"))
    return run([sys.executable, "-I", "-c", code], folder)


def run(command: list[str], folder: Path) -> str:
    """Runs a command in a folder, without a PYTHONPATH; returns what it prints."""
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
