"""Frames of a rank on a real pipe, from several writers at once."""

from __future__ import annotations

import os
import select
import threading

import pytest

from sparkdist import wire
from sparkdist.executor import events

SIZES = [0, 10, select.PIPE_BUF - 40, select.PIPE_BUF, 5 * select.PIPE_BUF, 1 << 20]


def read(reader: int, into: list[wire.Header]) -> None:
    listener = events.Listener()
    while data := os.read(reader, 1000):  # cuts frames anywhere
        into += listener.feed(data)


@pytest.mark.parametrize("size", SIZES)
def test_frames_of_threads_stay_whole_and_in_order(size):
    reader, writer = os.pipe()
    told: list[wire.Header] = []
    reading = threading.Thread(target=read, args=(reader, told))
    reading.start()
    count = 20 if size > 10_000 else 200

    def tell(name: str) -> None:
        for number in range(count):
            events.tell(writer, {"kind": name, "number": number, "text": name * size})

    threads = [threading.Thread(target=tell, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(writer)
    reading.join()
    os.close(reader)
    assert len(told) == 3 * count
    for name in "abc":
        mine = [header for header in told if header["kind"] == name]
        assert mine == [{"kind": name, "number": n, "text": name * size} for n in range(count)]


def test_what_never_became_whole_leaves_the_others_alone():
    listener = events.Listener()
    torn = wire.pack({"kind": "part", "of": "1/0", "is_last": False}, 3) + b"abc"
    whole = wire.pack({"kind": "returned"})
    last = wire.pack({"kind": "part", "of": "2/0", "is_last": True}, len(whole)) + whole
    assert list(listener.feed(torn + last + whole)) == [{"kind": "returned"}] * 2
