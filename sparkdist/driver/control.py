"""The driver's end of the control channel: one socket that every agent of a run connects to.

Stop, failure, the store's port, logs and large outcomes travel here in milliseconds. Frames are
bytes and JSON from peers that proved to know the run's token; nothing here unpickles.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from sparkdist import wire
from sparkdist.driver import progress
from sparkdist.driver.board import Board, Silence
from sparkdist.executor.shortage import shortage

_MAX_OUTCOME = 1 << 40  # bytes; what the driver can hold is for its memory to say
_MAX_STRANGERS = 64  # connections that have not authenticated yet
_PATIENCE = 0.1  # s that a stranger has before it makes room for others; an agent needs milliseconds

_SEND_TIME = struct.pack("ll", 5, 0)  # s and us that a frozen agent may hold up the others' orders
_STACKS_TIME = 3.0  # s that agents get to send stacks
_GATHER_AFTER = 5.0  # s that nodes have to connect after the first one

LogWriter = Callable[[int, bool, bytes, int], None]
RecordWriter = Callable[[int, bytes], None]


class ControlChannel:
    """Listens for the agents of one attempt and keeps the board up to date.

    Args:
        bind: Address to listen on.
        advertise: Address that agents are told.
        board: Where news is written.
        write_log: Gets (rank, is_stderr, whole lines, how many were dropped before).
        write_records: Gets (rank, what it said through Python's logging, as lines of JSON).
        ports: First and last port it may listen on; None for any.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(
        self,
        bind: str,
        advertise: str,
        board: Board,
        write_log: LogWriter,
        write_records: RecordWriter | None = None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        self.token = secrets.token_bytes(32)
        self._board = board
        self._write_log = write_log
        self._write_records = write_records
        self._lock = threading.Lock()
        self._agent_left = threading.Condition(self._lock)
        self._agents: list[socket.socket] = []
        self._last_words: list[wire.Header] = []  # what an agent that connects late must hear too
        self._strangers: dict[socket.socket, float] = {}  # since when; the oldest first
        self._room = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._alarm: threading.Timer | None = None
        self._is_stopping = False
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._listener = wire.bind(bind, ports)
        self.address = (advertise, int(self._listener.getsockname()[1]))
        try:
            self._acceptor = self._start(self._accept)
        except RuntimeError:  # there may be no more threads
            self._listener.close()
            raise

    def __enter__(self) -> ControlChannel:
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes every socket and waits for the threads."""
        self._closed.set()
        if self._alarm:
            self._alarm.cancel()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()  # then nobody comes any more
        with self._lock:
            for peer in (*self._strangers, *self._agents):
                _shut(peer)
        for thread in self._threads:
            thread.join(timeout=wire.HANDSHAKE_TIMEOUT)

    def stop_ranks(self, grace: float) -> None:
        """Has every agent, also one that connects later, end its ranks within `grace` seconds."""
        self._is_stopping = True
        self._broadcast({"kind": "stop", "grace": grace}, keep=True)

    def hear_out(self, seconds: float) -> None:
        """Waits until every agent has said all it had to say and closed its end, or for so long."""
        with self._lock:
            self._agent_left.wait_for(lambda: not self._agents, seconds)

    def ask_stacks(self) -> dict[int, str]:
        """Asks every connected agent for the stacks of its living ranks; returns those that come in time."""
        self._board.note(Board.forget_stacks)
        asked = self._broadcast({"kind": "stacks"})
        self._board.wait(lambda b: b.rows.done() or b.stack_reports >= asked, _STACKS_TIME)
        return self._board.stacks

    def _broadcast(self, header: wire.Header, keep: bool = False) -> int:
        """Tells every connected agent; returns how many these are."""
        with self._lock:
            if keep:
                self._last_words.append(header)
            for agent in self._agents:
                _tell(agent, header)
            return len(self._agents)

    def _expect(self, nodes: int) -> None:
        """Has the nodes find each other by Spark's means if one of them does not get through to here."""
        with self._lock:
            if nodes > 1 and self._alarm is None:
                self._alarm = threading.Timer(_GATHER_AFTER, self._gather)
                self._alarm.start()
            complete = self._alarm is not None and len(self._board.nodes) == nodes
            if self._alarm and complete:
                self._alarm.cancel()
        if complete:
            self._broadcast({"kind": "complete"})
            if self._board.lost:  # before they had all come
                self._broadcast({"kind": "incomplete"})

    def _gather(self) -> None:
        if not self._is_stopping:  # else tasks are ending that would have to take part
            self._broadcast({"kind": "gather"}, keep=True)

    def _start(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="sparkdist-control", daemon=True)
        thread.start()
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        return thread

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(_PATIENCE):
                    return
                continue  # one connection was lost, or there is no descriptor for it now
            self._make_room()
            with self._lock:
                self._strangers[conn] = time.monotonic()
            try:
                self._start(self._serve, conn)
            except RuntimeError:  # no more threads: the run goes on without this one
                self._dismiss(conn)
                conn.close()

    def _make_room(self) -> None:
        """Waits until one more stranger may come; the oldest is sent away if it has had its time."""
        if self._room.acquire(blocking=False):
            return
        with self._lock:
            oldest, since = next(iter(self._strangers.items()), (None, 0.0))
        if not self._room.acquire(timeout=max(0.0, since + _PATIENCE - time.monotonic())):
            with self._lock:
                if oldest in self._strangers:
                    _shut(oldest)
            self._room.acquire()

    def _dismiss(self, stranger: socket.socket) -> None:
        with self._lock:
            del self._strangers[stranger]
        self._room.release()

    def _serve(self, conn: socket.socket) -> None:
        node, took_leave = -1, False
        with conn:
            try:
                try:
                    wire.tune(conn)
                    conn.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIME)
                    wire.prove_as_server(conn, self.token)
                finally:
                    self._dismiss(conn)
                with self._lock:
                    self._agents.append(conn)
                    for header in self._last_words:
                        _tell(conn, header)
                while frame := wire.receive(conn, _MAX_OUTCOME):
                    self._take(*frame)
                    node = frame[0].get("node", node)
                    took_leave = frame[0]["kind"] == "bye"
            except MemoryError as error:  # for an outcome
                text = shortage(error)
                self._board.note(lambda board: setattr(board, "shortage", text))
            except (OSError, ValueError, RuntimeError):
                pass  # a stranger, or an agent that is gone; what became of its ranks comes as rows
            finally:
                with self._lock:
                    was_agent = conn in self._agents
                    if was_agent:
                        self._agents.remove(conn)
                        self._agent_left.notify_all()
                if was_agent and not took_leave and not self._closed.is_set():
                    self._board.note(lambda board: board.lost.setdefault(node, time.monotonic()))
                    self._broadcast({"kind": "incomplete"})

    def _take(self, header: wire.Header, body: bytearray) -> None:
        kind = header["kind"]
        if kind == "log":
            self._write_log(header["rank"], header["stderr"], bytes(body), header["dropped"])
        elif kind == "report":
            progress.take(self._board, header.get("rank"), bytes(body))
        elif kind == "record":
            if self._write_records:
                self._write_records(header["rank"], bytes(body))
        elif kind == "hello":
            self._board.note(lambda board: board.nodes.__setitem__(header["node"], time.monotonic()))
            self._expect(header["nodes"])
        elif kind == "gathered":
            self._board.note(lambda board: board.add_gathered(header["nodes"]))
        elif kind == "store":
            self._broadcast(header, keep=True)
        elif kind == "entered":
            self._board.note(lambda board: board.entered.__setitem__(header["rank"], time.monotonic()))
        elif kind == "returned":
            self._board.note(lambda board: board.returned.__setitem__(header["rank"], time.monotonic()))
        elif kind == "silent":
            silence = Silence(time.monotonic() - header["for"], header["state"])
            self._board.note(lambda board: board.silent.__setitem__(header["rank"], silence))
        elif kind == "moving":
            self._board.note(lambda board: board.silent.pop(header["rank"], None))
        elif kind == "failed":
            is_first = not self._board.failed
            self._board.note(lambda board: board.add_failed(header["rank"]))
            if is_first:
                self.stop_ranks(wire.GRACE)
        elif kind == "outcome":
            self._board.note(lambda board: board.outcomes.__setitem__(header["rank"], body))
        elif kind == "stacks":
            stacks = {int(rank): text for rank, text in header["stacks"].items()}
            self._board.note(lambda board: board.add_stacks(stacks, header["asleep"]))


def _tell(agent: socket.socket, header: wire.Header) -> None:
    try:
        wire.send(agent, header)
    except OSError:
        pass  # it is gone, and its task will say so


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
