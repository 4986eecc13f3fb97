"""What a process, a host or a disk has too little of: the limit behind an error of the system's, by name."""

from __future__ import annotations

import errno
import linecache
import os
import re
import resource
import socket
import traceback

from sparkdist import values

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FORK = re.compile(rb"(?:\w+\.)*(?:fork|forkpty|_?fork_exec|posix_spawnp?)\(")


def shortage(error: BaseException) -> str:
    """Says which limit an error met, on which host, and what to do; "" where it is something else."""
    number = error.errno if isinstance(error, OSError) else None
    text = values.safe_text(error)
    if number == errno.EMFILE:
        return (
            f"the limit of open files is reached on {socket.gethostname()} (RLIMIT_NOFILE is "
            f"{_soft(resource.RLIMIT_NOFILE)}): raise it where this process is started (ulimit -n)"
        )
    if number == errno.ENFILE:
        return (
            f"{socket.gethostname()} has no room for more open files (fs.file-max): close some, or raise it"
        )
    if text == "can't start new thread" or (number == errno.EAGAIN and _was_forking(error)):
        return (
            f"no more processes or threads can be started on {socket.gethostname()} (RLIMIT_NPROC is "
            f"{_soft(resource.RLIMIT_NPROC)}, RLIMIT_AS {_soft(resource.RLIMIT_AS)}, and a container has "
            "pids.max of its own): raise it where this process is started (ulimit -u, -v), or start fewer"
        )
    # What the dynamic linker says of a library is no OSError.
    if number == errno.ENOMEM or isinstance(error, MemoryError) or "failed to map segment" in text:
        return (
            f"there is no memory left on {socket.gethostname()} (RLIMIT_AS is {_soft(resource.RLIMIT_AS)}; "
            "ulimit -v and spark.executor.pyspark.memory set it): raise that limit, or use less"
        )
    if number == errno.EFBIG:
        return (
            f"the limit of a file's size is met on {socket.gethostname()} (RLIMIT_FSIZE is "
            f"{_soft(resource.RLIMIT_FSIZE)}; ulimit -f sets it), which holds for memory files, too"
        )
    if number in _DISK:
        where = f" at {error.filename!r}" if isinstance(error, OSError) and error.filename else ""
        return f"{os.strerror(number)} on {socket.gethostname()}{where}: free some, or use another folder"
    return ""


def is_of_disk(error: BaseException) -> bool:
    """Says whether an error is of a folder that is full, read-only, missing or closed to this user."""
    closed = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)
    return isinstance(error, OSError) and error.errno in (*_DISK, *closed)


def unusable(folder: object, error: OSError, setting: str) -> str:
    """Says that a folder cannot be used, why, and what names another.

    Args:
        folder: The folder.
        error: Why.
        setting: Where another one can be named, such as TMPDIR.
    """
    reason = error.strerror or error
    if not is_of_disk(error):
        reason = shortage(error) or reason
    return (
        f"the folder {str(folder)!r} on {socket.gethostname()} cannot be used: {reason}. See that it is "
        f"there, has room and can be written to, or name another one ({setting})."
    )


def limits() -> str:
    """Names this process's limits, for an end that says nothing."""
    return (
        f"Its limits: {_soft(resource.RLIMIT_NOFILE)} open files (ulimit -n), {_soft(resource.RLIMIT_NPROC)} "
        f"processes (ulimit -u), {_soft(resource.RLIMIT_AS)} bytes of address space (RLIMIT_AS, ulimit -v)."
    )


def soft_limits() -> dict[str, int]:
    """Returns this process's soft limits by name."""
    return {name: resource.getrlimit(number)[0] for name, number in _names().items()}


def take_limits(soft: dict[str, int]) -> None:
    """Makes another process's soft limits this one's, as far as its own hard ones let it."""
    for name, wanted in soft.items():
        number = _names().get(name)
        if number is None:
            continue
        old, hard = resource.getrlimit(number)
        if hard != resource.RLIM_INFINITY:
            wanted = hard if wanted == resource.RLIM_INFINITY else min(wanted, hard)
        if wanted != old:
            resource.setrlimit(number, (wanted, hard))


def _names() -> dict[str, int]:
    return {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def _soft(number: int) -> str:
    limit = resource.getrlimit(number)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _was_forking(error: BaseException) -> bool:
    """Says whether a call failed that starts a process: what would block says the same of itself."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].lineno is None or frames[-1].colno is None:
        return False
    line = linecache.getline(frames[-1].filename, frames[-1].lineno).encode()  # columns count bytes
    return _FORK.match(line, frames[-1].colno) is not None
