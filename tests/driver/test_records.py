"""What ranks log, as JSON lines in a file: whole, marked, and no reason for a run to fail."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
import warnings
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from sparkdist import ConfigurationError, Launcher, wire
from sparkdist.driver.board import Board
from sparkdist.driver.control import ControlChannel
from sparkdist.driver.records import RecordFile

SAID = {
    "time": 1700000000.25,
    "level": "INFO",
    "logger": "train.loop",
    "message": "epoch 3\nloss \ud800 \u2028 é",
}


def said(host: str = "h", **more: object) -> bytes:
    return json.dumps({"host": host, **SAID, **more}).encode() + b"\n"


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_record_is_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    with RecordFile(path, attempt=1, run_id="abc") as file:
        file.write(3, said("host-a") + said("host-a", exception="Traceback ..."))
    first, second = lines_of(path)
    assert list(first) == ["time", "rank", "host", "level", "logger", "message", "attempt", "run_id"]
    assert first == {**SAID, "time": "2023-11-14T22:13:20.250000+00:00", "rank": 3, "host": "host-a"} | {
        "attempt": 1,
        "run_id": "abc",
    }
    assert datetime.fromisoformat(str(first["time"])).timestamp() == SAID["time"]
    assert second["exception"] == "Traceback ..."
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_is_continued_and_keeps_its_mode(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"of": "another run"}\n')
    path.chmod(0o644)
    with RecordFile(path) as file:
        file.write(0, said())
    assert lines_of(path)[0] == {"of": "another run"} and len(lines_of(path)) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def append(path: Path, run: str, count: int) -> None:
    with RecordFile(path, run_id=run) as file:
        for i in range(count):
            file.write(i, said(message=f"{i} " + "x" * (i * 37 % 9000)))


def test_runs_of_several_drivers_share_a_file(tmp_path):
    path = tmp_path / "log.jsonl"
    drivers = [get_context("spawn").Process(target=append, args=(path, run, 400)) for run in "ab"]
    threads = [threading.Thread(target=append, args=(path, run, 400)) for run in "cd"]
    workers: list[Any] = [*drivers, *threads]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = lines_of(path)
    for run in "abcd":
        assert [line["rank"] for line in found if line["run_id"] == run] == list(range(400))


def test_a_full_disk_costs_lines_and_one_warning():
    with pytest.warns(UserWarning, match="logs_json: 5 lines .*'/dev/full': No space left") as warned:
        append(Path("/dev/full"), "run", 5)
    assert len(warned) == 1


def test_a_line_behind_one_that_found_no_room_can_be_read(tmp_path):
    # A pipe that does not wait takes a part of a line that is larger than its room.
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = RecordFile(path)
    file.write(0, said(message="x" * (1 << 20)))
    assert len(os.read(reader, 1 << 20)) < 1 << 20
    file.write(1, said())
    rest = os.read(reader, 1 << 20)
    os.close(reader)
    with pytest.warns(UserWarning, match="logs_json: 1 lines"):
        file.__exit__(None, None, None)
    assert rest.startswith(b"\n") and json.loads(rest)["rank"] == 1


def no_permission(tmp_path: Path) -> Path:
    return Path("/proc/self/logs.jsonl")  # root may write nearly everywhere else


def no_reader(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("make", [no_permission, no_reader])
def test_a_file_that_cannot_be_written_is_refused_before_a_rank_starts(tmp_path, clean, make):
    path, trace = make(tmp_path), tmp_path / "trace"
    launcher = Launcher("plain", local_mode=True, logs_json=path)
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=f"logs_json: cannot write to '{path}'"):
        launcher.run(trace.touch)
    assert time.monotonic() - began < 5 and not trace.exists()


def test_what_agents_send_is_written_with_their_host(tmp_path):
    path, board = tmp_path / "log.jsonl", Board()
    with (
        warnings.catch_warnings(action="error"),
        RecordFile(path, run_id="abc") as file,
        ControlChannel("127.0.0.1", "127.0.0.1", board, print, file.write) as channel,
        socket.create_connection(channel.address, timeout=10) as agent,
    ):
        wire.prove_as_client(agent, channel.token)
        wire.send(agent, {"kind": "hello", "node": 0, "nodes": 1})
        wire.send(agent, {"kind": "record", "rank": 7}, said("host-a") * 2)
        assert board.wait(lambda b: bool(b.nodes), 10)
        agent.shutdown(socket.SHUT_WR)
        channel.hear_out(10)
    assert [(line["rank"], line["host"]) for line in lines_of(path)] == [(7, "host-a")] * 2


def test_an_odd_record_costs_itself_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    with pytest.warns(UserWarning, match="logs_json: 8 lines"), RecordFile(path) as file:
        file.write(0, said(time=1e300) + b'{"dropped": 7}\n' + said())
    assert len(lines_of(path)) == 1
