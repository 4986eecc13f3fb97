"""Processes as Linux sees them: parentage, descendants, and how to end a whole tree.

Groups and sessions are not enough to find a run's processes, since any of them may call setsid;
parentage is. Agent and forkserver are child subreapers, so whoever loses its parent below them
becomes their child.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
_KILL_TIME = 5.0  # s after which a process that SIGKILL does not end (a dead disk, say) is given up
_HELPER_GRACE = 1.0  # s that shared-memory helpers get to clean /dev/shm once their users are dead
_STATES = {
    "R": "running",
    "S": "asleep",
    "T": "stopped",
    "t": "traced",
    "D": "in uninterruptible sleep",
    "Z": "a zombie",
}
_TICKS = os.sysconf("SC_CLK_TCK")
_TRACKER = b"from multiprocessing.resource_tracker import"  # how multiprocessing starts its own

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Makes this process the parent of every orphan below it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends.

    It fires when the *thread* that forked ends, so fork from a thread that lives as long.

    Args:
        parent: The parent's pid, as it was before the fork.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def start_time(pid: int) -> int:
    """Returns a process's start time in clock ticks since boot; with its pid it is unique.

    Raises:
        OSError: There is no such process.
    """
    return int(_stat(pid)[19])


def is_exiting(pid: int) -> bool:
    """Says whether a process has begun to end (PF_EXITING) or has ended."""
    try:
        stat = _stat(pid)
    except OSError:
        return True
    return stat[0] in "ZX" or bool(int(stat[6]) & _PF_EXITING)


def state(pid: int) -> str:
    """Returns a one-line description of a process from /proc, for when it cannot speak itself."""
    try:
        letter = _stat(pid)[0]
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return f"process {pid} has ended"
    return f"process {pid} is {_STATES.get(letter, 'in state ' + letter)} (kernel: {place or '-'})"


class Usage(NamedTuple):
    """What a process has done so far.

    Attributes:
        state: The letter of its state.
        cpu: Its CPU time in seconds, a multiple of 1 / SC_CLK_TCK.
        io: Bytes that it read or wrote by system calls of files; of sockets, those of `read` and `write`.
    """

    state: str
    cpu: float
    io: int


def usage(pid: int) -> Usage:
    """Returns what a process has done so far.

    Raises:
        OSError: There is no such process.
    """
    stat = _stat(pid)
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except PermissionError:
        lines = []  # it has become another user's
    io = sum(int(number) for name, number in map(str.split, lines) if name in ("rchar:", "wchar:"))
    return Usage(stat[0], (int(stat[11]) + int(stat[12])) / _TICKS, io)


def runs(pid: int) -> int:
    """Returns how often a process's main thread has got to run; -1 where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[2])
    except OSError:
        return -1


def usages(pids: Iterable[int]) -> dict[int, Usage]:
    """Returns what those of the processes have done that are there."""
    found = {}
    for pid in pids:
        try:
            found[pid] = usage(pid)
        except OSError:
            pass  # ended since
    return found


def children() -> dict[int, list[int]]:
    """Returns the children of every process that has any."""
    found: dict[int, list[int]] = {}
    for pid, parent, letter in _processes():
        if letter != "Z":
            found.setdefault(parent, []).append(pid)
    return found


def descendants(root: int, tree: dict[int, list[int]] | None = None) -> list[int]:
    """Returns the pids of all processes below `root`, parents before children.

    Args:
        root: The process.
        tree: What `children` has returned, to look at many processes at once; None for a fresh one.
    """
    tree = children() if tree is None else tree
    found, queue = [], [root]
    while queue:
        below = tree.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yields the pid, the parent and the state's letter of every process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                letter, parent, *_ = _stat(int(entry))
            except OSError:
                continue
            yield int(entry), int(parent), letter


def end_descendants(spare: Callable[[int], bool] = lambda pid: False) -> None:
    """Kills every process below this one and reaps those that are its children.

    Shared-memory helpers come last: they delete what the dead left in /dev/shm.

    Args:
        spare: Says of a pid that it, and what is below it, lives on.
    """
    _end(lambda: [pid for pid in _not_spared(spare) if not _is_helper(pid)], grace=0.0)
    _end(lambda: _not_spared(spare), grace=_HELPER_GRACE)
    for pid, parent, letter in _processes():
        if parent == os.getpid() and letter == "Z" and not spare(pid):
            _reap(pid)


def _end(find: Callable[[], list[int]], grace: float) -> None:
    """Waits up to `grace` seconds for processes to end, then kills until none is found."""
    deadline = time.monotonic() + grace
    pids = find()
    while pids and time.monotonic() < deadline + _KILL_TIME:
        left = deadline - time.monotonic()
        if left > 0:
            _wait_any(pids, left)
        else:
            for pid in pids:
                _kill(pid)
            _wait_any(pids, 0.05)
        pids = find()


def _not_spared(spare: Callable[[int], bool]) -> list[int]:
    found = descendants(os.getpid())
    spared: set[int] = set()
    for pid in found:
        if spare(pid):
            spared |= {pid, *descendants(pid)}
    return [pid for pid in found if pid not in spared]


def _wait_any(pids: Iterable[int], timeout: float) -> None:
    """Waits until one of the processes has ended."""
    poll, opened = select.poll(), []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        opened.append(fd)
        poll.register(fd, select.POLLIN)
    if opened:
        poll.poll(timeout * 1000)
    for fd in opened:
        os.close(fd)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass  # reaped meanwhile


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _is_helper(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return command[0].endswith(b"torch_shm_manager") or any(arg.startswith(_TRACKER) for arg in command)


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; the name before may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def memory_kills() -> int:
    """Returns how many processes the kernel has killed for memory in this process's cgroup."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            files = [f"/sys/fs/cgroup{path}/memory.events", f"/sys/fs/cgroup/unified{path}/memory.events"]
        elif "memory" in controllers.split(","):
            files = [f"/sys/fs/cgroup/memory{path}/memory.oom_control"]
        else:
            continue
        # Inside a container the path is the host's; its own root is mounted at the top.
        files += [name.replace(path, "", 1) for name in files if path != "/"]
        for name in files:
            count = _counter(Path(name), "oom_kill")
            if count is not None:
                return count
    return 0


def _counter(file: Path, name: str) -> int | None:
    try:
        rows = (line.split() for line in file.read_text().splitlines())
    except OSError:
        return None
    return next((int(row[1]) for row in rows if row[:1] == [name]), None)


def user_of(conn: socket.socket) -> int:
    """Returns the user at the other end of a Unix socket."""
    peer = conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1])
