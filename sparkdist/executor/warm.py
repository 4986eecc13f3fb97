"""How to reach an agent: connect to the warm forkserver of a kind, starting it if there is none.

One server per executor and kind. Its folder holds a lock and a socket; whoever starts it binds and
listens first and spawns second, so that of any number of racing starters one wins and all are
connected at once, while the import still runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sparkdist.executor import process
from sparkdist.executor.checks import installed_version
from sparkdist.executor.interpreter import make_ready
from sparkdist.executor.order import NodeError
from sparkdist.executor.shortage import limits

MARKER = "SPARKDIST_FORKSERVER"  # in the environment the server was started with: finds its tree in /proc

HOME = "sparkdist-{pid}-"  # how the name begins of the folder that a driver keeps for servers of its own
LIFELINE = "lifeline-"
# Imported with one thread: a pool started in the server would be missing, and waited for, in a fork.
_SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
START = (
    "import os, sys\n"
    "if os.fork(): os._exit(0)\n"  # so that the starter has no child left behind
    "os.dup2(1, 2)\n"  # no more to the starter's
    "sys.path[0] = sys.argv[1]\n"
    "from sparkdist.executor.forkserver import main\n"
    "main()"
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a forkserver is for; runs that differ in any of it do not share one.

    Attributes:
        root: Folder that holds the sparkdist package.
        preload: Modules to import.
        preload_idle: Modules to import once no run needs the server.
        distribution: The framework's package; its version is part of the key.
        environ: Variables that are read when Python starts or the framework is imported.
        parent: Pid of the process it ends with: Spark's Python daemon, or the driver.
        idle_timeout: Seconds without a run after which it ends.
        python: The interpreter it runs in.
        environment: What the user calls the environment that has this interpreter or what is
            first on its path; "" where it is the node's own.
        path: Where modules may be found that the interpreter has nowhere else.
        versions: What the driver has and the interpreter must have too, by name.
    """

    root: str
    preload: tuple[str, ...]
    preload_idle: tuple[str, ...]
    distribution: str | None
    environ: Mapping[str, str]
    parent: int
    idle_timeout: float
    python: str = sys.executable
    environment: str = ""
    path: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def key(self) -> str:
        """Returns a name that only equal kinds share."""
        # Where there is none, its import will fail in the server, which answers with the reason.
        version = (installed_version(self.distribution) or "") if self.distribution else ""
        parts = [
            *(self.root, self.python, self.path, self.preload, self.preload_idle, version),
            *(sorted(self.environ.items()), sorted(self.versions.items()), self.environment),
            *(self.parent, process.start_time(self.parent), self.idle_timeout),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def connect(
    kind: Kind, base: Path, environ: Mapping[str, str], lifeline: Path | None = None
) -> socket.socket:
    """Returns a connection to a new agent of this kind's server, which is started if need be.

    Args:
        kind: The kind of server.
        base: Folder in which servers have theirs.
        environ: Environment to start a server with.
        lifeline: A folder whose end is the server's end too.

    Raises:
        NodeError: The kind's interpreter does not run here.
        OSError: This process has met one of its limits.
    """
    key = kind.key()
    environ = {**environ, **dict.fromkeys(_SINGLE_THREAD, "1"), **kind.environ, MARKER: key}
    try:
        folder = _own_folder(base / f"sparkdist-fork-{key}")
        with locked(folder):
            if lifeline and lifeline.exists():  # a cleaner of /tmp may have been there
                _tie(folder, lifeline)
            return _connect_or_start(kind, folder, environ)
    except OSError:
        # The folder cannot be used (read-only, full, missing): a server for this run alone.
        ours, theirs = socket.socketpair()
        with theirs:
            _spawn(kind, None, theirs, environ)
        return ours


def _tie(folder: Path, lifeline: Path) -> None:
    """Ties a server to one more folder: it ends when a link of this kind dangles."""
    name = hashlib.sha256(str(lifeline).encode()).hexdigest()[:16]
    try:
        os.symlink(lifeline, folder / f"{LIFELINE}{name}")
    except FileExistsError:
        pass


def _connect_or_start(kind: Kind, folder: Path, environ: Mapping[str, str]) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{fd}/socket"  # a socket's path may have 108 bytes at most
        try:
            client.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            (folder / "socket").unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(socket.SOMAXCONN)
                client.connect(path)
                _spawn(kind, folder, listener, environ)
    except BaseException:
        client.close()
        raise
    finally:
        os.close(fd)
    return client


def _spawn(kind: Kind, folder: Path | None, sock: socket.socket, environ: Mapping[str, str]) -> None:
    if kind.python != sys.executable:
        make_ready(kind.python, kind.environment, kind.versions, environ)
    arguments = {
        "fd": sock.fileno(),
        "folder": str(folder) if folder else None,
        "parent": [kind.parent, process.start_time(kind.parent)],
        "idle_timeout": kind.idle_timeout,
        "preload": kind.preload,
        "preload_idle": kind.preload_idle,
        "environment": kind.environment,
        "path": kind.path,
        "versions": dict(kind.versions),
    }
    with os.fdopen(os.memfd_create("sparkdist-start"), "w+b") as said:
        child = subprocess.Popen(
            [kind.python, "-c", START, kind.root, json.dumps(arguments)],
            env=dict(environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=[sock.fileno()],
            start_new_session=True,
        )
        if child.wait():
            said.seek(0)
            reason = said.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise NodeError(
                f"{kind.python} does not start on {socket.gethostname()} ({reason or child.returncode}). "
                f"{limits()}"
            )


def _own_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private folder of this user")
    return path


@contextmanager
def locked(folder: Path, block: bool = True) -> Iterator[None]:
    """Holds a server folder's lock.

    Raises:
        BlockingIOError: Somebody else holds it, and `block` is False.
    """
    fd = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)
