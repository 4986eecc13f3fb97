"""A rank that the kernel kills for memory: the error says so."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 400 << 20  # bytes; Python, pyspark's pickler and our own processes take a quarter of it

DRIVER = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))

from sparkdist import Launcher, TrainingFailed
from tests.faults import programs

launcher = Launcher("plain", num_processes=2, local_mode=True, timeout=60)
try:
    launcher.run(programs.one_each, programs.sleep_for_ever, programs.eat_a_gigabyte)
except TrainingFailed as error:
    failure = error.root
    print(failure.rank, failure.kind, failure.signal, failure.hint, str(error), sep="|")
assert launcher.launch(programs.rank).values == [0, 1]
"""


def _memory_group() -> tuple[Path, str] | None:
    """This process's cgroup that counts memory, and the name of its limit; None where there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for top in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified"):
            for inside in (path, "/"):  # in a container the path may be the host's
                group = Path(top + inside)
                if controllers == "memory" and (group / "memory.limit_in_bytes").exists():
                    return group, "memory.limit_in_bytes"
                if not controllers and "memory" in _read(group / "cgroup.controllers"):
                    return group, "memory.max"
    return None


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A fresh cgroup with little memory."""
    found = _memory_group()
    if found is None:
        pytest.skip("no cgroup here counts memory")
    parent, limit = found
    group = parent / f"sparkdist-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(LIMIT))
            for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                if (group / swap).exists():
                    (group / swap).write_text(str(LIMIT) if "memsw" in swap else "0")
        except OSError as error:
            pytest.skip(f"cgroups cannot be limited here: {error}")
        yield group
    finally:
        group.rmdir()


def test_out_of_memory(small_group: Path, clean: None):
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    command = [sys.executable, "-c", DRIVER, str(small_group)]
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rank, kind, signal, hint, text = done.stdout.split("|", 4)
    assert (rank, kind, signal) == ("1", "signal", "SIGKILL")
    assert "out of memory" in hint
    assert f"rank 1 was killed by SIGKILL ({hint})" in text
