"""The agent: one per node and attempt. It starts, watches and ends the node's ranks.

A single-threaded loop over pidfds, pipes, the socket to the task and the link to the driver; it
calls no framework. When the task's socket ends, the task is gone, and everything here is killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from sparkdist import wire
from sparkdist.executor import process, report
from sparkdist.executor.link import Link, dial
from sparkdist.executor.logs import LogPump
from sparkdist.executor.meeting import Meeting
from sparkdist.executor.order import NodeError, NodeLost, Order
from sparkdist.executor.pulse import Pulse
from sparkdist.executor.ranks import RETURNED, STACK_SIGNAL, Rank
from sparkdist.executor.run_folder import RunFolder
from sparkdist.executor.shortage import shortage, take_limits
from sparkdist.executor.stacks import Stacks
from sparkdist.executor.staff import Staff
from sparkdist.executor.topology import Node

_PULSE = 0.05  # s between looks while something is being waited for that sends no event
_PARCEL_LIMIT = 4 << 30  # bytes


def run_agent(conn: socket.socket, folder: RunFolder, library_fds: set[int]) -> None:
    """Serves one run on this node.

    Args:
        conn: The socket to the task, which sends the order and gets the outcomes.
        folder: Where this run's files go; made and removed here, and by the forkserver once more: this
            process may be killed.
        library_fds: Descriptors that imported libraries opened; ranks keep them.
    """
    process.become_subreaper()
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # so that a rank may be asked before it can answer
    try:
        wire.send(conn, {"kind": "started"})
        told = wire.receive(conn, max_body=0)
        function = wire.receive(conn, max_body=_PARCEL_LIMIT)
        parcel = wire.receive(conn, max_body=_PARCEL_LIMIT)
        if told is None or function is None or parcel is None:
            return
        take_limits(told[0].get("limits", {}))  # not those that the server happens to have been started with
        order = Order.from_json(told[0]["order"])
        link = Link(dial(order))
        try:
            agent = Agent(conn, order, told[0], link, folder)
            agent.staff.prepare(bytes(function[1]), bytes(parcel[1]), library_fds)
            agent.run()
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException:
            link.close()  # with a farewell: the other nodes are not to think that this one was lost
            raise
    except (BrokenPipeError, ConnectionResetError):
        pass  # the task is gone
    except NodeError as error:
        wire.send(conn, {"kind": "lost" if isinstance(error, NodeLost) else "error", "message": str(error)})
    except BaseException as error:
        message = shortage(error) or f"the agent failed:\n{traceback.format_exc()}"
        wire.send(conn, {"kind": "error", "message": message})
    finally:
        process.end_descendants()
        folder.remove()


class Agent:
    """The loop over one node's ranks."""

    def __init__(
        self, conn: socket.socket, order: Order, message: dict[str, Any], link: Link, folder: RunFolder
    ) -> None:
        self.order = order
        self.node = Node(**message["node"])
        self._is_script = self.order.script is not None
        self._conn = conn
        self.link = link
        self.staff = Staff(self.order, self.node, message, folder)
        self._pulse = Pulse(self.order.stall_timeout, self.link.send)
        self._pumps = {rank.rank: LogPump(rank.rank, self._emitter(rank.rank)) for rank in self.staff.ranks}
        self._selector = selectors.DefaultSelector()
        self._task_frames = wire.FrameReader(max_body=0)
        self._stacks = Stacks()
        self._meeting = Meeting(self.node.count, self.link, self._ask_task)
        self._meeting_point: tuple[str, int] | None = None
        self._kill_at: float | None = None
        self._memory_kills = process.memory_kills()

    def _emitter(self, rank: int) -> Callable[[int, bool, bytes], None] | None:
        wanted = self.order.logs == "all" or (self.order.logs == "rank0" and rank == 0)
        return self.link.send_log if wanted else None

    def run(self) -> None:
        """Runs the ranks to their end and reports to the task."""
        self.link.send({"kind": "hello", "node": self.node.index, "nodes": self.node.count})
        self._watch(self._conn, self._task_spoke)
        if self.link.sock:
            self._watch(self.link.sock, self._driver_spoke)
        self.staff.park()
        for rank in self.staff.ranks:
            self._watch_rank(rank)
        self._meeting_point = self.staff.open_store()
        if self._meeting_point:
            address, port = self._meeting_point
            self.link.send({"kind": "store", "address": address, "port": port})
        if not self.link.up:
            self._meeting.gather()
        if self._meeting_point:
            self._start_ranks(*self._meeting_point)
        while self.staff.busy() or (self._meeting.is_to_come and not self._kill_at):
            self._turn()
        self._finish()

    def _ask_task(self) -> None:
        wire.send(self._conn, {"kind": "gather", "store": self._meeting_point})

    def _start_ranks(self, address: str, port: int) -> None:
        if self.staff.started:
            return
        self.staff.start(address, port)
        if self.staff.launcher:
            self._watch(self.staff.launcher.pidfd, self._launcher_ended)

    def _watch_rank(self, rank: Rank) -> None:
        self._watch(rank.pipes.events, self._rank_spoke, rank)
        self._watch(rank.pipes.stdout, self._rank_printed, rank, False)
        self._watch(rank.pipes.stderr, self._rank_printed, rank, True)
        if rank.pid:
            self._watch(rank.pidfd, self._rank_ended, rank, rank.pidfd)

    def _watch(self, thing: Any, action: Callable[..., None], *args: Any) -> None:
        self._selector.register(thing, selectors.EVENT_READ, (action, args))

    def _forget(self, thing: Any) -> None:
        try:
            self._selector.unregister(thing)
        except (KeyError, ValueError):
            pass  # unwatched already, or closed

    def _turn(self) -> None:
        waiting = self.link.pending or self._kill_at or self._stacks.is_asking
        ready = self._selector.select(_PULSE if waiting else self._pulse.pause)
        # Deaths first: they cause what peers do. Then what ranks tell, which is before what they print next.
        ready.sort(key=lambda item: [item[0].data[0] != act for act in (self._rank_ended, self._rank_spoke)])
        for key, _ in ready:
            action, args = key.data
            action(*args)
        self.link.push()
        self._pulse.beat(self.staff.living(), disturbed=self._stacks.is_asking or bool(self._kill_at))
        now = time.monotonic()
        if self._kill_at and now > self._kill_at:
            self.staff.signal(signal.SIGKILL)
        if self._stacks.are_due():
            self.link.send(self._stacks.take())

    def _task_spoke(self) -> None:
        data = self._conn.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        for header, _ in self._task_frames.feed(data):
            self._meeting.end()
            self._start_ranks(*header["store"])

    def _driver_spoke(self) -> None:
        for header in self.link.receive():
            if header["kind"] == "store":
                self._start_ranks(header["address"], header["port"])
            elif header["kind"] == "stop":
                if self._kill_at is None and not self.staff.framework.whole_node:
                    # The failure elsewhere may be of a peer that saw this one's connection end.
                    self.staff.blame_the_dying(time.monotonic())
                self.stop(header["grace"])
            elif header["kind"] == "stacks":
                self._stacks.ask(self.staff.living())
            elif header["kind"] == "gather":
                self._meeting.gather()
            elif header["kind"] == "complete":
                self._meeting.complete()
            elif header["kind"] == "incomplete":
                self._meeting.lose_node(self.staff.started)
        if not self.link.up:
            self._forget(self.link.sock)
            self._meeting.lose_node(self.staff.started)

    def stop(self, grace: float = wire.GRACE) -> None:
        """Asks every living rank to end, and kills it after `grace` seconds."""
        self.staff.started = True  # or never will be
        if self._kill_at is None and grace > 0:
            self.staff.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        self._kill_at = min(self._kill_at or deadline, deadline)

    def _rank_spoke(self, rank: Rank) -> None:
        try:
            data = os.read(rank.pipes.events, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._forget(rank.pipes.events)
        for header in rank.frames.feed(data):
            pid = rank.pid
            if header["kind"] in ("report", "record", "said"):
                self.link.send_data(header["kind"], rank.rank, header["data"])
                continue
            rank.take_event(header)
            if rank.pid != pid and rank.pidfd >= 0:
                self._watch(rank.pidfd, self._rank_ended, rank, rank.pidfd)
            if rank.complained:
                self._failed(rank)
            elif header["kind"] != "started":
                kind = "returned" if header["kind"] in RETURNED else "entered"
                self.link.send({"kind": kind, "rank": rank.rank})

    def _failed(self, rank: Rank) -> None:
        """Notes a failure; the gang lives and dies together, unless a launcher decides about it."""
        if self._kill_at or rank.failed_at:
            return  # what a rank does once it was asked to stop is no failure of its own
        now = time.monotonic()
        self.staff.blame_the_dying(now)
        rank.fail(now + 1e-5)  # a peer that is just dying came first
        if self.staff.framework.whole_node:
            return
        self._tell_failures()
        self.stop()

    def _tell_failures(self) -> None:
        """Has the other nodes stopped."""
        for failed in sorted(self.staff.ranks, key=lambda rank: rank.failed_at):
            if failed.failed_at:
                self.link.send({"kind": "failed", "rank": failed.rank})

    def _rank_printed(self, rank: Rank, is_stderr: bool) -> None:
        fd = rank.pipes.stderr if is_stderr else rank.pipes.stdout
        size = self._pumps[rank.rank].pump(fd, is_stderr)
        if size == 0:
            self._forget(fd)  # closed by the user's code; else it would be ready for ever
        rank.heard = rank.heard or bool(size)

    def _rank_ended(self, rank: Rank, pidfd: int) -> None:
        self._forget(pidfd)
        if self.staff.framework.whole_node:
            if rank.left is None and rank.pidfd == pidfd:
                self._failed(rank)
            return  # its launcher reaps it, and may start it again
        self._drain(rank)
        rank.reap()
        if not rank.succeeded(self._is_script):
            self._failed(rank)

    def _drain(self, rank: Rank) -> None:
        self._rank_spoke(rank)
        for fd in (rank.pipes.events, rank.pipes.stdout, rank.pipes.stderr):
            self._forget(fd)
        self._pumps[rank.rank].finish({False: rank.pipes.stdout, True: rank.pipes.stderr})

    def _launcher_ended(self) -> None:
        launcher = self.staff.launcher
        assert launcher
        self._forget(launcher.pidfd)
        codes = launcher.reap()
        for rank in self.staff.ranks:
            self._drain(rank)
        if launcher.exit_code and not self._kill_at and not any(rank.pid for rank in self.staff.ranks):
            tail = "\n".join(self._pumps[self.staff.ranks[0].rank].tail())
            raise NodeError(f"{self.order.launcher} {launcher.end} before any rank started:\n{tail}")
        for local, rank in enumerate(self.staff.ranks):
            rank.alive = False
            rank.exit_code = codes.get(local, None if launcher.exit_code else 0)
            if launcher.exit_code and local not in codes and not rank.complained:
                rank.failed_at = 0.0  # stopped by the launcher, for a peer's sake or its own
            elif not rank.succeeded(self._is_script):
                self._failed(rank)
        self._tell_failures()  # now that it has decided

    def _finish(self) -> None:
        """Ends what ranks left behind and reports to driver and task."""
        if self._stacks.is_asking:
            self.link.send(self._stacks.take())
        process.end_descendants()
        rows = report.outcomes(self.staff, self.link, self._pumps, self._memory_kills)
        self.link.close()
        for row, _ in rows:
            row["unheard"] = self._meeting.some_unheard or not self.link.up
            row["untold"] = not self._meeting.is_complete
        rows += self.link.left_over(wire.LOGS_LIMIT // self.order.world_size)
        for row, data in rows:
            wire.send(self._conn, {"kind": "row", "row": row}, data)
        wire.send(self._conn, {"kind": "done"})
