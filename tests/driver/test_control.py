"""The driver's end of the control channel: who may speak, what late agents hear, what is left after it."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from contextlib import ExitStack

import pytest

from sparkdist import wire
from sparkdist.driver.board import Board
from sparkdist.driver.control import ControlChannel
from tests import support

HOST = "127.0.0.1"
PATIENCE = 10.0  # s


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def channel(board, lines):
    """A channel, and the promise that nothing is left of it."""
    threads, files = set(threading.enumerate()), open_files()
    with ControlChannel(HOST, HOST, board, lambda *line: lines.append(line)) as opened:
        yield opened
    assert set(threading.enumerate()) == threads
    assert open_files() == files


@pytest.fixture
def peers(channel):
    """Where a test's own sockets go; they end after it, and before the channel does."""
    with ExitStack() as stack:
        yield stack


def open_files():
    listed = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {(path, os.readlink(path)) for path in listed if os.path.lexists(path)}  # not the listing's own


def dial(peers, channel):
    sock = peers.enter_context(socket.create_connection(channel.address, timeout=PATIENCE))
    assert isinstance(sock, socket.socket)
    return sock


def join(peers, channel):
    """Connects as an agent."""
    sock = dial(peers, channel)
    wire.prove_as_client(sock, channel.token)
    sock.settimeout(PATIENCE)
    return sock


def next_frame(sock):
    frame = wire.receive(sock, max_body=0)
    assert frame is not None
    return frame[0]


def is_cut_off(sock):
    """Says whether the channel ends the connection, whatever it sends before."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass  # it closed with our bytes unread
    return True


def test_a_stop_reaches_an_agent_that_connects_after_it(channel, peers):
    early = join(peers, channel)
    channel.stop_ranks(2.5)
    late = join(peers, channel)
    assert next_frame(early) == next_frame(late) == {"kind": "stop", "grace": 2.5}
    channel.stop_ranks(0.0)  # asked for twice: at once
    latest = join(peers, channel)
    assert next_frame(early) == next_frame(late) == {"kind": "stop", "grace": 0.0}
    assert [next_frame(latest)["grace"] for _ in range(2)] == [2.5, 0.0]


def test_what_is_asked_of_living_ranks_is_not_repeated_to_a_late_agent(channel, peers, board):
    early = join(peers, channel)
    wire.send(early, {"kind": "hello", "node": 0, "nodes": 1})
    assert board.wait(lambda b: bool(b.nodes), PATIENCE)  # it has been taken in
    channel.ask_stacks()
    assert next_frame(early) == {"kind": "stacks"}
    late = join(peers, channel)
    channel.stop_ranks(1.0)
    assert next_frame(late) == {"kind": "stop", "grace": 1.0}


def test_a_failure_on_one_node_stops_the_others_at_once(channel, peers, board):
    agents = [join(peers, channel) for _ in range(3)]
    for node, agent in enumerate(agents):
        wire.send(agent, {"kind": "hello", "node": node, "nodes": 1})
    assert board.wait(lambda b: len(b.nodes) == 3, PATIENCE)
    began = time.monotonic()
    wire.send(agents[1], {"kind": "failed", "rank": 4})
    assert [next_frame(agent)["kind"] for agent in agents] == ["stop"] * 3
    assert time.monotonic() - began < 1
    assert board.failed == [4]


def test_an_agent_that_is_gone_does_not_keep_the_others_from_hearing(channel, peers, board):
    gone = join(peers, channel)
    # Closed such that the next send to it fails: with a reset.
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stays = join(peers, channel)
    wire.send(stays, {"kind": "hello", "node": 0, "nodes": 1})
    assert board.wait(lambda b: bool(b.nodes), PATIENCE)  # it has been taken in
    gone.close()
    assert next_frame(stays) == {"kind": "incomplete"}  # a node cannot be told of failures any more
    for grace in (3.0, 2.0, 1.0):
        channel.stop_ranks(grace)
        assert next_frame(stays)["grace"] == grace


def test_nobody_misses_an_agent_that_took_its_leave(channel, peers):
    goes, stays = join(peers, channel), join(peers, channel)
    wire.send(goes, {"kind": "bye"})
    goes.close()
    channel.hear_out(0)
    channel.stop_ranks(1.0)
    assert next_frame(stays)["kind"] == "stop"


def test_nodes_gather_if_one_of_them_does_not_come(channel, peers, monkeypatch):
    monkeypatch.setattr("sparkdist.driver.control._GATHER_AFTER", 0.2)
    first = join(peers, channel)
    wire.send(first, {"kind": "hello", "node": 0, "nodes": 2})
    assert next_frame(first) == {"kind": "gather"}
    second = join(peers, channel)
    assert next_frame(second) == {"kind": "gather"}  # so that it takes part
    wire.send(second, {"kind": "hello", "node": 1, "nodes": 2})
    assert next_frame(first) == next_frame(second) == {"kind": "complete"}


def test_nodes_that_are_ending_do_not_gather_any_more(channel, peers, board, monkeypatch):
    monkeypatch.setattr("sparkdist.driver.control._GATHER_AFTER", 0.2)
    first = join(peers, channel)
    wire.send(first, {"kind": "hello", "node": 0, "nodes": 2})
    wire.send(first, {"kind": "failed", "rank": 0})
    assert next_frame(first)["kind"] == "stop"
    assert channel._alarm
    channel._alarm.join(PATIENCE)
    late = join(peers, channel)
    assert next_frame(late)["kind"] == "stop"
    channel.stop_ranks(0.0)
    assert next_frame(late) == {"kind": "stop", "grace": 0.0}


def test_lines_of_many_agents_stay_whole(channel, peers, board, lines):
    def speak(agent, rank):
        for i in range(200):
            wire.send(
                agent, {"kind": "log", "rank": rank, "stderr": False, "dropped": 0}, b"%d of %d\n" % (i, rank)
            )
        wire.send(agent, {"kind": "returned", "rank": rank})

    agents = [join(peers, channel) for _ in range(8)]
    threads = [threading.Thread(target=speak, args=(agent, rank)) for rank, agent in enumerate(agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.wait(lambda b: len(b.returned) == 8, PATIENCE)
    for rank in range(8):
        assert [line for r, _, line, _ in lines if r == rank] == [
            b"%d of %d\n" % (i, rank) for i in range(200)
        ]


GARBAGE = {
    "a frame without a handshake": wire.pack({"kind": "failed", "rank": 0}) * 64,
    "a frame behind zeros": bytes(64) + wire.pack({"kind": "failed", "rank": 0}),
    "noise": random.Random(2).randbytes(1 << 16),
    "another protocol": b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n" * 4,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_cut_off_and_believed_in_nothing(channel, peers, board, data):
    stranger = dial(peers, channel)
    try:
        stranger.sendall(data)
    except ConnectionError:
        pass  # it has been cut off already
    assert is_cut_off(stranger)
    agent = join(peers, channel)
    wire.send(agent, {"kind": "hello", "node": 0, "nodes": 1})
    assert board.wait(lambda b: bool(b.nodes), PATIENCE)
    assert board.failed == []


@pytest.mark.parametrize("token", [b"", b"\0" * 32, os.urandom(32)], ids=["none", "zeros", "another run's"])
def test_a_wrong_token_never_gets_a_frame_through(channel, peers, board, token):
    liar = dial(peers, channel)
    liar.sendall(os.urandom(32))
    nonce = liar.recv(64, socket.MSG_WAITALL)[:32]
    # What an agent that does not check the driver's proof would answer, and a frame right behind it.
    proof = wire._mac(token, b"client", nonce, nonce)
    liar.sendall(proof + wire.pack({"kind": "failed", "rank": 0}) + wire.pack({"kind": "broken"}))
    assert is_cut_off(liar)
    agent = join(peers, channel)
    wire.send(agent, {"kind": "hello", "node": 0, "nodes": 1})
    assert board.wait(lambda b: bool(b.nodes), PATIENCE)
    assert board.failed == []
    channel.stop_ranks(7.0)
    assert next_frame(agent)["grace"] == 7.0  # the first stop: the liar's "broken" made none


def test_a_stranger_learns_no_proof_that_it_could_show_as_an_agent(channel, peers):
    # Reflection: what the channel proves of itself must not serve to prove an agent.
    first, second = dial(peers, channel), dial(peers, channel)
    second.sendall(os.urandom(32))
    challenge = second.recv(64, socket.MSG_WAITALL)[:32]
    first.sendall(challenge)
    answer = first.recv(64, socket.MSG_WAITALL)
    second.sendall(answer[32:])
    assert is_cut_off(second)


def test_a_crowd_of_idle_strangers_costs_an_agent_next_to_nothing(channel, peers, board):
    for _ in range(200):
        dial(peers, channel)
    began = time.monotonic()
    agent = join(peers, channel)
    wire.send(agent, {"kind": "hello", "node": 0, "nodes": 1})
    assert board.wait(lambda b: bool(b.nodes), PATIENCE)
    assert time.monotonic() - began < 5


def test_an_agent_lost_in_the_middle_of_a_frame_changes_nothing(channel, peers, board):
    torn = join(peers, channel)
    torn.sendall(wire.pack({"kind": "outcome", "rank": 0}, 1000) + bytes(10))
    torn.close()
    agent = join(peers, channel)
    wire.send(agent, {"kind": "outcome", "rank": 1}, b"whole")
    assert board.wait(lambda b: bool(b.outcomes), PATIENCE)
    assert board.outcomes == {1: b"whole"}


def test_an_ipv6_driver():
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        with pytest.raises(OSError):
            ControlChannel("::1", "::1", Board(), print)
        return
    board = Board()
    with ControlChannel("::1", "::1", board, print) as channel, ExitStack() as peers:
        wire.send(join(peers, channel), {"kind": "hello", "node": 0, "nodes": 1})
        assert board.wait(lambda b: bool(b.nodes), PATIENCE)


def test_closing_ends_everything_at_once(board):
    threads, files = set(threading.enumerate()), open_files()
    with ExitStack() as peers:
        with ControlChannel(HOST, HOST, board, print) as channel:
            port = channel.address[1]
            agents = [join(peers, channel) for _ in range(5)]
            agents[0].sendall(wire.pack({"kind": "outcome", "rank": 0}, 1 << 30))  # and waits for the rest
            silent = [dial(peers, channel) for _ in range(20)]
            silent[0].sendall(b"half a nonce")
            assert {listener.port for listener in support.listeners()} >= {port}
            began = time.monotonic()
        assert time.monotonic() - began < 2
        # While all the others' ends are still open.
        assert set(threading.enumerate()) == threads
        assert all(map(is_cut_off, [*agents, *silent]))
        assert port not in {listener.port for listener in support.listeners()}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=PATIENCE)
    assert open_files() == files


def test_closing_while_strangers_keep_coming(board):
    done = threading.Event()

    def keep_coming(address):
        while not done.is_set():
            try:
                socket.create_connection(address, timeout=PATIENCE).close()
            except OSError:
                return

    threads = set(threading.enumerate())
    with ControlChannel(HOST, HOST, board, print) as channel:
        visitors = [threading.Thread(target=keep_coming, args=(channel.address,)) for _ in range(4)]
        for visitor in visitors:
            visitor.start()
        with ExitStack() as peers:
            wire.send(join(peers, channel), {"kind": "hello", "node": 0, "nodes": 1})
            assert board.wait(lambda b: bool(b.nodes), PATIENCE)
        began = time.monotonic()
    assert time.monotonic() - began < 2
    done.set()
    for visitor in visitors:
        visitor.join()
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("header", [{}, {"rank": None}, {"rank": "0"}, {"rank": [1]}, {"rank": 0}])
@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"{}\n[3]\nnull\n", b"[" * 100_000, b'{"metrics": {"a": []}}']
)
def test_reports_that_are_none_harm_nobody(channel, peers, board, header, body):
    odd, good = join(peers, channel), join(peers, channel)
    wire.send(odd, {"kind": "report", **header}, body)
    said = b'{"attempt": 0, "step": 3, "metrics": {"loss": NaN}, "time": 1.0}\n'
    wire.send(odd, {"kind": "report", "rank": 1}, said)
    wire.send(good, {"kind": "report", "rank": 2}, said)
    assert board.wait(lambda b: len(b.reported) == 2, PATIENCE)
    assert [(report.rank, report.step) for report in sorted(board.reports, key=lambda r: r.rank)] == [
        (1, 3),
        (2, 3),
    ]
