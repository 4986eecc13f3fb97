"""One rank as its agent holds it: its process, its pipes, and the files it leaves its outcome in."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

from sparkdist import wire
from sparkdist.executor import events, process

STACK_SIGNAL = signal.SIGRTMIN + 7  # asks a rank for its Python stack; ours, since users take SIGUSR1 and 2
RETURNED = ("returned", "unpicklable")  # what a rank says when its function came to its end


class Pipes:
    """The descriptors that tie a rank to its agent.

    Outcomes and stacks are memory files, not pipes: a rank writes any size and is gone, with no
    reader to wait for, and a rank that dies half-way leaves no half message.

    Attributes:
        stdout, stderr: Read ends of the rank's output.
        events: Read end of its frames: started, entered, left; records and reports meanwhile.
        orders: Write end of what the rank waits for before it starts.
        outcome: The pickled value or exception.
        stacks: What faulthandler writes.
        theirs: The rank's ends, in the order of `worker.Ends`.
    """

    def __init__(self) -> None:
        self.stdout, their_stdout = os.pipe()
        self.stderr, their_stderr = os.pipe()
        self.events, their_events = os.pipe()
        their_orders, self.orders = os.pipe()
        self.outcome = os.memfd_create("sparkdist-outcome")
        self.stacks = os.memfd_create("sparkdist-stacks")
        self.theirs = (their_orders, their_events, their_stdout, their_stderr, self.outcome, self.stacks)
        for fd in (self.stdout, self.stderr, self.events):
            os.set_blocking(fd, False)

    def close_theirs(self) -> None:
        """Closes the rank's ends of the pipes, so that its death ends them."""
        for fd in self.theirs[:4]:
            os.close(fd)


class Rank:
    """A rank of this node.

    Attributes:
        rank: Its number in the gang.
        pid: Its process; 0 until it has one.
        entered: Whether it has entered the user's code.
        left: What it said on leaving the user's code, or None.
        exit_code: Its exit code, negative for a signal; None while it lives or if nobody knows it.
        alive: Whether its process has not been seen to end.
        failed_at: When it was first seen to have failed by itself (time.monotonic()), or 0.
        heard: Whether it printed something since the last look at it.
        silent: Whether it has not done anything for `stall_timeout`.
        runs: How often its main thread had run when it fell asleep; -1 if it has not slept for long.
        stacks_seen: Size of its printed stacks at the last look.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0
        self.pidfd = -1
        self.pipes = Pipes()
        self.frames = events.Listener()
        self.entered = False
        self.left: wire.Header | None = None
        self.exit_code: int | None = None
        self.alive = True
        self.failed_at = 0.0
        self.heard = False
        self.silent = False
        self.runs = -1
        self.stacks_seen = -1

    def fork(self, body: Callable[[], None]) -> None:
        """Forks the rank's process, which runs `body` and never returns from it."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                process.die_with_parent(parent)
                body()
            except BaseException:
                traceback.print_exc()  # into its last lines, once its output is the agent's
            finally:
                os._exit(1)
        self.follow(pid)

    def follow(self, pid: int) -> None:
        """Takes a process as the rank's own."""
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.pidfd = -1  # it said hello and has ended; its launcher tells how

    def start(self, orders: dict[str, Any]) -> None:
        """Sends what the parked rank waits for."""
        data = wire.pack(orders)
        os.set_blocking(self.pipes.orders, True)
        while data:
            try:
                data = data[os.write(self.pipes.orders, data) :]
            except BrokenPipeError:
                break  # it died while parked; its exit status tells
        os.close(self.pipes.orders)

    @property
    def complained(self) -> bool:
        """Whether it said itself that it has failed."""
        return self.left is not None and self.left["kind"] not in RETURNED

    def take_event(self, header: wire.Header) -> None:
        """Notes what the rank said of itself."""
        if header["kind"] == "entered":
            self.entered = True
        elif header["kind"] != "started":
            self.left = header
        elif self.pid != header["pid"]:  # a launcher of the framework's own has started it, or again
            self.follow(header["pid"])
            self.entered, self.left, self.failed_at = False, None, 0.0

    def fail(self, now: float) -> None:
        """Notes that the rank has failed by itself; what comes later no longer counts."""
        self.failed_at = self.failed_at or now

    def reap(self) -> None:
        """Takes the exit code of the ended process."""
        self.alive = False
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def succeeded(self, script: bool) -> bool:
        """Says whether the ended rank did what it was to do.

        A script's exit code is its outcome. A function's outcome is what it returned, whatever
        happens while its process winds up; that a value does not pickle is no failure of the
        training, and no reason to stop the others.
        """
        if script:
            return self.exit_code == 0
        return self.left is not None and self.left["kind"] in RETURNED

    def verdict(self, script: bool) -> wire.Header:
        """Returns what became of the ended rank, as data."""
        if self.succeeded(script):
            return self.left or {"kind": "returned", "type_name": "NoneType", "seconds": 0.0}
        if not self.failed_at:
            return {"kind": "stopped"}
        if self.left and self.complained:
            return self.left
        if self.exit_code is None:
            return {"kind": "lost", "message": "its exit code is unknown"}
        if self.exit_code < 0:
            return {"kind": "signal", "signal": _signal_name(-self.exit_code)}
        return {"kind": "exited", "code": self.exit_code, "message": ""}

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's process if it lives."""
        if self.pidfd >= 0 and self.alive:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
                if number == signal.SIGTERM:
                    signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)  # a stopped one would not hear it
            except ProcessLookupError:
                pass

    def outcome_size(self) -> int:
        """Returns the size in bytes of what the rank left as its outcome."""
        return os.fstat(self.pipes.outcome).st_size

    def read_outcome(self) -> bytes:
        """Returns what the rank left as its outcome."""
        return os.pread(self.pipes.outcome, self.outcome_size(), 0)

    def is_fast_asleep(self) -> bool:
        """Says whether it is silent and its main thread has not run at all for long."""
        return self.silent and self.runs >= 0 and self.runs == process.runs(self.pid)

    def stacks_size(self) -> int:
        """Returns the size in bytes of the stacks printed so far."""
        return os.fstat(self.pipes.stacks).st_size

    def read_stacks(self) -> str:
        """Returns the printed stacks, or what /proc says of a rank that printed none."""
        text = os.pread(self.pipes.stacks, self.stacks_size(), 0).decode(errors="replace")
        return text or process.state(self.pid)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
