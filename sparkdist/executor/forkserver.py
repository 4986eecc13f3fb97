"""The forkserver: imports the framework once, then forks an agent for each run.

`warm.py` starts it. It ends with its parent, with its folder, or when idle for too long.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from sparkdist import wire
from sparkdist.executor import process
from sparkdist.executor.agent import run_agent
from sparkdist.executor.kept import sweep
from sparkdist.executor.preload import import_all, open_fds, prepare, safe_to_fork
from sparkdist.executor.run_folder import RunFolder, remove_left
from sparkdist.executor.shortage import shortage, unusable
from sparkdist.executor.warm import HOME, LIFELINE, START, locked

_WATCH_INTERVAL = 1.0  # s between looks at whether the folder is still there
_IMPORT_WHEN_IDLE = 2.0  # s without a run after which what no start waited for is imported


def main() -> NoReturn:
    """What a forkserver's process does, from its arguments on the command line."""
    arguments = json.loads(sys.argv[2])
    process.become_subreaper()
    try:
        with _guarded(arguments):
            sys.path += arguments["path"]
            problem = prepare(arguments)
    except OSError as error:
        problem = _reason(error)
    if not problem and arguments["preload"] and not safe_to_fork():
        # Without the versions, too: they have been compared.
        _start_over(arguments | {"preload": [], "preload_idle": [], "versions": {}})
    library_fds = open_fds() - {arguments["fd"]}
    _Server(arguments, problem, library_fds).serve()


@contextmanager
def _guarded(arguments: dict[str, Any]) -> Iterator[None]:
    """Has this process ended if its parent ends meanwhile: an import may hang, and nobody watch."""
    server = os.getpid()
    theirs, ours = os.pipe()
    guard = os.fork()
    if guard == 0:
        try:
            os.close(ours)
            os.close(arguments["fd"])
            parent, started = arguments["parent"]
            _await_end(parent, started, theirs)
            os.kill(server, signal.SIGKILL)
            _remove_folders(arguments)
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        yield
    finally:
        os.close(ours)
        os.waitpid(guard, 0)


def _await_end(parent: int, started: int, server: int) -> None:
    """Waits for the end of the parent; exits if that of the server's pipe comes first."""
    try:
        pidfd = os.pidfd_open(parent)
        if process.start_time(parent) != started:
            return
    except OSError:
        return
    if server in select.select([pidfd, server], [], [])[0]:
        os._exit(0)


def _remove_folders(arguments: dict[str, Any]) -> None:
    """Removes a server's folder, and the one that a driver keeps for its servers: it may have been killed."""
    if arguments["folder"]:
        folder, pid = Path(arguments["folder"]), arguments["parent"][0]
        is_home = folder.parent.name.startswith(HOME.format(pid=pid))
        shutil.rmtree(folder.parent if is_home else folder, ignore_errors=True)


def _start_over(arguments: dict[str, Any]) -> NoReturn:
    """Becomes a server with fewer imports, which ranks then do by themselves: slower, but sound."""
    os.set_inheritable(arguments["fd"], True)
    os.execv(sys.executable, [sys.executable, "-c", START, sys.argv[1], json.dumps(arguments)])


def _reason(error: OSError) -> str:
    return shortage(error) or f"the forkserver on {socket.gethostname()} failed: {error}"


def _refuse(conn: socket.socket, problem: str) -> bool:
    """Answers why there will be no agent; says whether somebody waited for an answer."""
    try:
        wire.send(conn, {"kind": "error", "message": problem})
    except OSError:
        return False
    return True


class _Server:
    """Accepts connections, forks an agent for each, and buries what agents leave behind."""

    def __init__(self, arguments: dict[str, Any], problem: str, library_fds: set[int]) -> None:
        self._arguments = arguments
        self._sock = socket.socket(fileno=arguments["fd"])
        self._folder = Path(arguments["folder"]) if arguments["folder"] else None
        self._problem = problem
        self._runs = self._folder or self._make_folder()  # where each run has one
        remove_left(self._runs)
        self._library_fds = library_fds  # opened by imports; ranks keep them
        self._agents: dict[int, int] = {}  # pidfd -> pid
        self._idle_since = time.monotonic()
        self._poll = select.poll()
        self._parent = self._watch_parent(*arguments["parent"])
        if self._folder:
            self._sock.setblocking(False)
            self._poll.register(self._sock, select.POLLIN)

    def _make_folder(self) -> Path:
        try:
            return Path(tempfile.mkdtemp(prefix="sparkdist-"))
        except OSError as error:
            self._problem = self._problem or unusable(os.environ.get("TMPDIR", "/tmp"), error, "TMPDIR")
            return Path("/nonexistent")  # it ends with its answer

    def _watch_parent(self, pid: int, started: int) -> int:
        try:
            fd = os.pidfd_open(pid)
            if process.start_time(pid) != started:
                raise ProcessLookupError
        except OSError:
            self._end_with_parent()  # it ended while we were starting
        self._poll.register(fd, select.POLLIN)
        return fd

    def serve(self) -> NoReturn:
        """Serves until the parent or the folder is gone, or nothing came for too long."""
        if self._folder is None:
            self._fork_agent(self._sock)
        while self._folder or self._agents:
            for fd, _ in self._poll.poll(_WATCH_INTERVAL * 1000):
                if fd == self._parent:
                    self._end_with_parent()
                elif fd in self._agents:
                    self._bury(fd)
                else:
                    self._accept()
            if self._folder and not self._is_wanted(self._folder):
                self._end()
            is_kept = sweep(self._runs)
            if self._folder and not self._agents:
                self._be_idle(time.monotonic() - self._idle_since, is_kept)
        self._end()

    def _be_idle(self, seconds: float, is_kept: bool) -> None:
        if seconds > self._arguments["idle_timeout"] and not is_kept:
            self._retire()
        elif seconds > _IMPORT_WHEN_IDLE and self._arguments["preload_idle"]:
            with warnings.catch_warnings():  # a rank that never imports them must not have their filters
                problem = import_all(self._arguments["preload_idle"])
            if problem or not safe_to_fork():
                _start_over(self._arguments | {"preload_idle": []})
            self._arguments["preload_idle"] = []
            self._library_fds = open_fds() - {self._sock.fileno(), self._parent}

    def _is_wanted(self, folder: Path) -> bool:
        try:
            return all(entry.exists() for entry in folder.iterdir() if entry.name.startswith(LIFELINE))
        except (FileNotFoundError, NotADirectoryError):
            return False  # the folder itself is gone
        except OSError:
            return True  # nobody can tell

    def _accept(self) -> None:
        try:
            conn, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_WATCH_INTERVAL)  # no descriptor is left for it before another run has ended
            return
        conn.setblocking(True)
        if process.user_of(conn) != os.geteuid():
            conn.close()
            return
        self._fork_agent(conn)

    def _fork_agent(self, conn: socket.socket) -> None:
        if self._problem:
            if not _refuse(conn, self._problem):
                conn.close()
                return  # who only warms up waits for no answer; the next one does
            self._end()  # what is missing may be installed before the next run asks
        pid = -1
        try:
            pid = os.fork()
            if pid == 0:
                self._become_agent(conn)
            fd = os.pidfd_open(pid)
        except OSError as error:
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            _refuse(conn, _reason(error))
        else:
            self._agents[fd] = pid
            self._poll.register(fd, select.POLLIN)
        conn.close()

    def _become_agent(self, conn: socket.socket) -> NoReturn:
        try:
            for fd in (self._parent, *self._agents):
                os.close(fd)
            if self._folder:
                self._sock.close()
            run_agent(conn, RunFolder(self._runs, os.getpid()), self._library_fds)
        finally:
            os._exit(0)

    def _bury(self, fd: int) -> None:
        """Reaps an agent, then kills and removes whatever of its run is left."""
        agent = self._agents.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        os.waitpid(agent, 0)
        alive = set(self._agents.values())
        process.end_descendants(spare=alive.__contains__)
        RunFolder(self._runs, agent).remove()
        self._idle_since = time.monotonic()

    def _retire(self) -> None:
        """Ends an idle server, unless somebody is just connecting."""
        assert self._folder
        try:
            with locked(self._folder, block=False):
                if not select.select([self._sock], [], [], 0)[0]:
                    self._end()
        except BlockingIOError:
            return

    def _end_with_parent(self) -> NoReturn:
        self._leave_nothing()
        _remove_folders(self._arguments)
        os._exit(0)

    def _end(self) -> NoReturn:
        self._leave_nothing()
        os._exit(0)

    def _leave_nothing(self) -> None:
        for agent in self._agents.values():
            os.kill(agent, signal.SIGKILL)
        process.end_descendants()
        for agent in self._agents.values():
            RunFolder(self._runs, agent).remove()
        shutil.rmtree(self._runs, ignore_errors=True)
