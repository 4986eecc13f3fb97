"""Frames, the handshake, and the control channel among strangers."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from sparkdist import Launcher, wire
from sparkdist.driver import control
from sparkdist.driver.board import Board
from sparkdist.driver.control import ControlChannel
from tests.support import listeners, wait_until

TOKEN, OTHER = b"t" * 32, b"o" * 32


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def receive(sock, max_body=0):
    """Reads one frame, its body as bytes."""
    frame = wire.receive(sock, max_body)
    return frame and (frame[0], bytes(frame[1]))


# --- frames -------------------------------------------------------------------------------------


def test_a_frame_makes_the_trip(pair):
    ours, theirs = pair
    for header, body in (({"kind": "a", "n": [1, None]}, b""), ({"ü": "\n\0"}, bytes(range(256)))):
        wire.send(ours, header, body)
        assert receive(theirs, max_body=256) == (header, body)


def test_an_end_between_frames_is_none_and_inside_one_an_error(pair):
    ours, theirs = pair
    wire.send(ours, {"kind": "whole"})
    ours.sendall(wire.pack({"kind": "cut"}, 10) + b"half")
    ours.shutdown(socket.SHUT_WR)
    assert receive(theirs, max_body=10) == ({"kind": "whole"}, b"")
    with pytest.raises(wire.WireError, match="middle"):
        receive(theirs, max_body=10)
    assert receive(theirs, max_body=10) is None


TOO_LARGE = [(wire.MAX_HEADER + 1, 0), (2, 1001), (2**32 - 1, 2**64 - 1)]


@pytest.mark.parametrize("sizes", TOO_LARGE)
def test_too_large_a_frame_is_refused_by_its_lengths_alone(pair, sizes):
    # Nothing but the lengths comes: whoever allocates or waits for the rest would stay here.
    ours, theirs = pair
    theirs.settimeout(5)
    ours.sendall(struct.pack("!IQ", *sizes))
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.receive(theirs, max_body=1000)
    with pytest.raises(wire.WireError, match="over the limit"):
        list(wire.FrameReader(max_body=1000).feed(struct.pack("!IQ", *sizes)))


def test_a_frame_at_the_limit_is_taken(pair):
    ours, theirs = pair
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(wire.send, ours, {}, bytes(1 << 20))
        assert receive(theirs, max_body=1 << 20) == ({}, bytes(1 << 20))
        sent.result()


@pytest.mark.parametrize("piece", [1, 2, 5, 13, 1000])
def test_a_stream_in_pieces_gives_the_same_frames(piece):
    draw = random.Random(piece)
    frames = [
        ({"n": n, "text": "x" * draw.randrange(40)}, draw.randbytes(draw.randrange(40))) for n in range(20)
    ]
    stream = b"".join(wire.pack(header, len(body)) + body for header, body in frames)
    reader = wire.FrameReader(max_body=40)
    found: list[object] = []
    for start in range(0, len(stream), piece):
        found += reader.feed(stream[start : start + piece])
    assert found == frames


# --- the handshake ------------------------------------------------------------------------------


def shake(pair, server_token, client_token):
    """Lets both sides prove themselves; returns what each raised."""
    ours, theirs = pair

    def attempt(prove, sock, token):
        try:
            prove(sock, token)
        except OSError as error:
            sock.shutdown(socket.SHUT_RDWR)
            return error
        return None

    with ThreadPoolExecutor() as pool:
        server = pool.submit(attempt, wire.prove_as_server, ours, server_token)
        client = pool.submit(attempt, wire.prove_as_client, theirs, client_token)
        return server.result(), client.result()


def test_who_knows_the_token_is_let_in_and_may_take_its_time_later(pair):
    assert shake(pair, TOKEN, TOKEN) == (None, None)
    assert [sock.gettimeout() for sock in pair] == [None, None]


def test_who_does_not_is_refused_by_both_sides(pair):
    server, client = shake(pair, TOKEN, OTHER)
    assert isinstance(client, wire.WireError) and "token" in str(client)
    assert isinstance(server, OSError)


def test_a_client_that_ignores_the_servers_failure_is_refused(pair):
    ours, theirs = pair
    with ThreadPoolExecutor() as pool:
        server = pool.submit(wire.prove_as_server, ours, TOKEN)
        theirs.sendall(bytes(32))
        answer = theirs.recv(64, socket.MSG_WAITALL)
        theirs.sendall(answer[32:])  # the server's own proof, sent back to it
        with pytest.raises(wire.WireError, match="token"):
            server.result()


def test_a_server_that_echoes_is_refused(pair):
    ours, theirs = pair
    with ThreadPoolExecutor() as pool:
        client = pool.submit(wire.prove_as_client, theirs, TOKEN)
        nonce = ours.recv(32, socket.MSG_WAITALL)
        ours.sendall(nonce + nonce)
        with pytest.raises(wire.WireError, match="token"):
            client.result()


@pytest.mark.parametrize("prove", [wire.prove_as_server, wire.prove_as_client])
def test_a_peer_cannot_draw_the_handshake_out(pair, prove, monkeypatch):
    # Silence, and bytes that each come just in time.
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT", 0.3)
    ours, theirs = pair
    stop = threading.Event()

    def drip():
        while not stop.wait(0.02):
            theirs.send(b"x")

    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        dripping = pool.submit(drip)
        try:
            with pytest.raises(OSError):
                prove(ours, TOKEN)
        finally:
            stop.set()
        assert time.monotonic() - began < 1.0
        dripping.result()


# --- the control channel ------------------------------------------------------------------------


class Agent:
    """An agent's end of a channel."""

    def __init__(self, channel, token=None):
        self.sock = socket.create_connection(channel.address, timeout=10)
        wire.prove_as_client(self.sock, token or channel.token)
        self.sock.settimeout(10)


@contextmanager
def channel():
    board, lines = Board(), []
    with ControlChannel("127.0.0.1", "127.0.0.1", board, lambda *line: lines.append(line)) as opened:
        yield opened, board, lines


def closed(sock):
    """Reads to the end; says whether there was one."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass  # closed with bytes unread
    except TimeoutError:
        return False
    return True


def strangers(opened, count):
    return [socket.create_connection(opened.address, timeout=10) for _ in range(count)]


def test_news_reach_the_board_and_orders_the_agents():
    with channel() as (opened, board, lines):
        first, second = Agent(opened), Agent(opened)
        wire.send(first.sock, {"kind": "hello", "node": 0, "nodes": 1})
        wire.send(first.sock, {"kind": "log", "rank": 1, "stderr": True, "dropped": 2}, b"a line\n")
        wire.send(first.sock, {"kind": "entered", "rank": 1})
        wire.send(first.sock, {"kind": "outcome", "rank": 1}, b"bytes")
        wire.send(first.sock, {"kind": "stacks", "stacks": {"1": "a stack"}, "asleep": []})
        wire.send(first.sock, {"kind": "store", "address": "127.0.0.1", "port": 5})
        assert board.wait(lambda b: b.stack_reports == 1, 10)
        assert (list(board.nodes), list(board.entered)) == ([0], [1])
        assert (board.outcomes, board.stacks) == ({1: b"bytes"}, {1: "a stack"})
        assert lines == [(1, True, b"a line\n", 2)]
        third = Agent(opened)  # one that comes late hears what matters, too
        for agent in (second, third):
            assert receive(agent.sock) == ({"kind": "store", "address": "127.0.0.1", "port": 5}, b"")
        wire.send(second.sock, {"kind": "failed", "rank": 1})
        fourth = Agent(opened)
        for agent in (third, fourth):
            while (frame := receive(agent.sock)) and frame[0]["kind"] != "stop":
                pass
            assert frame == ({"kind": "stop", "grace": wire.GRACE}, b"")
        assert board.failed == [1]


def test_without_the_token_no_message_gets_through():
    frame = wire.pack({"kind": "failed", "rank": 0})
    with channel() as (opened, board, _), ExitStack() as stack:
        garbage = [
            frame * 100,
            random.Random(1).randbytes(4096),
            bytes(64) + frame,
            b"GET / HTTP/1.1\r\n\r\n" * 9,
        ]
        for data, sock in zip(garbage, strangers(opened, len(garbage)), strict=True):
            stack.enter_context(sock).sendall(data)
            assert closed(sock)
        with pytest.raises(wire.WireError, match="token"):
            Agent(opened, OTHER)
        agent = Agent(opened)
        wire.send(agent.sock, {"kind": "hello", "node": 0, "nodes": 1})
        assert board.wait(lambda b: 0 in b.nodes, 10)
        assert board.failed == []


def test_a_hundred_silent_strangers_keep_no_agent_out_and_hold_nobody_up():
    with ExitStack() as stack:
        with channel() as (opened, board, _):
            first = Agent(opened)
            for sock in strangers(opened, 100):
                stack.enter_context(sock)
            began = time.monotonic()
            late = Agent(opened)
            for node, agent in enumerate((first, late)):
                wire.send(agent.sock, {"kind": "hello", "node": node, "nodes": 1})
            assert board.wait(lambda b: len(b.nodes) == 2, 10)
            alive = [t for t in threading.enumerate() if t.name == "sparkdist-control"]
            assert len(alive) <= control._MAX_STRANGERS + 3
            closing = time.monotonic()
        assert time.monotonic() - closing < 2  # the strangers are still there
        assert closing - began < 5
    assert wait_until(lambda: "sparkdist-control" not in {t.name for t in threading.enumerate()}, 5)


def test_two_hundred_agents_at_once_all_come_in():
    with channel() as (opened, board, _), ThreadPoolExecutor(200) as pool, ExitStack() as stack:
        together = threading.Barrier(200)

        def join(node):
            together.wait()
            agent = Agent(opened)
            wire.send(agent.sock, {"kind": "hello", "node": node, "nodes": 1})
            return agent

        for agent in pool.map(join, range(200)):
            stack.enter_context(agent.sock)
        assert board.wait(lambda b: len(b.nodes) == 200, 20)


def test_strangers_do_not_disturb_a_run(clean, capfd, tmp_path):
    before = listeners()
    done = tmp_path / "done"

    def pester():
        assert wait_until(lambda: bool(listeners() - before), 20)
        (listener,) = listeners() - before
        socks = [socket.create_connection(("127.0.0.1", listener.port), timeout=10) for _ in range(150)]
        for sock in socks[::2]:
            try:
                sock.sendall(random.randbytes(200))
            except OSError:
                pass  # sent away already
        done.touch()
        return socks

    def talk():
        print("from a rank")
        deadline = time.monotonic() + 30
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return done.exists()

    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        pestering = pool.submit(pester)
        values = Launcher("plain", num_processes=2, local_mode=True).launch(talk).values
        for sock in pestering.result():
            stack.enter_context(sock)
    assert values == [True, True]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] from a rank", "[rank 1] from a rank"]
