"""What a run could leave besides processes: temporary files, shared memory, descriptors of this process.

tests/conftest.py gives each test session a temporary folder of its own, so that what appears there is its.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests import support

SHARED_MEMORY = Path("/dev/shm")

# Spark's folders, and the one that torch keeps for what it compiles.
_OF_OTHERS = ("blockmgr-", "spark-", "artifacts-", "torchinductor_")
_DRIVERS_FOLDER = re.compile(r"sparkdist-(\d+)-")
# Of a run in a warm server's folder, two kinds; of a package that is just being unpacked.
_INSIDE = ("**/sparkdist-fork-*/run-*", "**/sparkdist-fork-*/kept/*", "**/blockmgr-*/tmp*")
_OF_GRPC = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")


def traces() -> Counter[str]:
    """Everything there is now, as words for a message."""
    return Counter([*_files(), *_shared_memory(), *_descriptors()])


def since(before: Counter[str]) -> Counter[str]:
    """What has come since, and is more than garbage."""
    if left := traces() - before:
        gc.collect()  # an error holds its frames, and they what they used
        left = traces() - before
    return left


def _files() -> Iterator[str]:
    """Temporary files, but for others', for what drivers keep while they live, and for warm servers."""
    top, live = Path(tempfile.gettempdir()), support.parents()
    for path in top.iterdir():
        owner = _DRIVERS_FOLDER.match(path.name)
        if not path.name.startswith(_OF_OTHERS) and not (owner and int(owner[1]) in live):
            yield f"the file {path}"
    for pattern in _INSIDE:
        yield from (f"the file {path}" for path in top.glob(pattern))


def _shared_memory() -> Iterator[str]:
    """What is in /dev/shm, but for what processes of others use: all of a machine share it."""
    names = os.listdir(SHARED_MEMORY)
    strangers = support.parents().keys() - {os.getpid(), *support.session_processes()} if names else set()
    used = "\n".join(text for pid in strangers for text in _used_by(pid))
    return (f"the shared memory {name}" for name in names if f"{SHARED_MEMORY}/{name}" not in used)


def _used_by(pid: int) -> Iterator[str]:
    yield from support.descriptors(pid)
    try:
        yield Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        pass  # ended since


def _descriptors() -> Iterator[str]:
    """Where this process's descriptors lead, but for those that Spark's clients open when they need them."""
    to_spark = _connections_to_spark()
    for target in support.descriptors(os.getpid()):
        if target in to_spark or ("grpc" in sys.modules and target in _OF_GRPC):
            continue
        yield f"a descriptor of {target}"


def _connections_to_spark() -> set[str]:
    """This process's sockets whose other end is, or was, a JVM of this test session."""
    ends = support.ports_of_spark()
    found = set()
    for fields in support.tcp_sockets(os.getpid()):
        here, there = (int(end.rpartition(":")[2], 16) for end in fields[1:3])
        if there in ends or (there, here) in ends:
            found.add(f"socket:[{fields[9]}]")
    return found
