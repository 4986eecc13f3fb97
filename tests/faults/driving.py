"""Drivers of their own, for faults of a whole process: how tests start them, and what they use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparkdist import Launcher, PreflightError, Results
from tests import support
from tests.faults import programs

ROOT = Path(__file__).parents[2]
PRELUDE = """
import json, os, resource, shutil, subprocess, sys, tempfile
from pathlib import Path
from sparkdist import Launcher, PreflightError, ResultError, TrainingFailed
from tests import support
from tests.faults import driving, programs
"""


def drive(program: str, *args: object, within: Sequence[str] = (), **environ: str) -> str:
    """Runs a program in a process of its own, which must succeed, and returns what it printed.

    Args:
        program: Python source; what PRELUDE imports is there.
        *args: Its arguments.
        within: A command that runs it, such as `prlimit --nofile=64`.
        **environ: Variables that it gets beyond this process's own.
    """
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [*within, sys.executable, "-c", PRELUDE + program, *map(str, args)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- for the programs ---------------------------------------------------------------------------


def session(master: str = "local[2]", **confs: object) -> Any:
    """Starts a Spark session; `__` in a name stands for a dot."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", False)
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.ui.showConsoleProgress", False)
    for name, value in confs.items():
        builder = builder.config(f"spark.{name.replace('__', '.')}", value)
    started = builder.getOrCreate()
    started.sparkContext.setLogLevel("OFF")
    return started


def launch(local_mode: bool, program: Callable[..., Any] = programs.rank, *args: Any, **kw: Any) -> Results:
    """Launches a plain function on two ranks."""
    launcher = Launcher("plain", num_processes=2, local_mode=local_mode, **{"timeout": 60, **kw})
    return launcher.launch(program, *args)


def attempt(local_mode: bool, *args: Any, **settings: Any) -> str:
    """Launches what may be unable to run; returns "works" or the text of the error, which come soon."""
    began = time.monotonic()
    try:
        launch(local_mode, *args, **settings)
        text = "works"
    except PreflightError as error:
        text = str(error)
    seconds = time.monotonic() - began
    return text if seconds < 20 and "Traceback" not in text else f"after {seconds} s: {text}"


def ends_well(local_mode: bool) -> None:
    """Has one more run, and sees that nothing is left of any."""
    assert launch(local_mode).values == [0, 1]
    assert support.wait_until(lambda: not support.run_processes(), 5), support.run_processes()


def threads_of_user() -> int:
    """How many threads this user has: what RLIMIT_NPROC counts."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def mount(folder: str, megabytes: int = 4) -> None:
    """Mounts a small disk."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "disk", folder], check=True)


def spoil(folder: str, how: str) -> None:
    """Makes a small disk full, read-only or missing."""
    assert os.path.ismount(folder)  # no other is to be filled
    if how == "full":
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError), open(f"{folder}/filler-{size}", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(size))
    elif how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    else:
        subprocess.run(["umount", "--lazy", folder], check=True)
        os.rmdir(folder)


def mend(folder: str, how: str) -> None:
    """Undoes that."""
    if how == "full":
        for filler in Path(folder).glob("filler-*"):
            filler.unlink()
    elif how == "read-only":
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
    else:
        os.mkdir(folder)
        mount(folder)
