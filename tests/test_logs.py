"""What ranks say, from their first byte to the driver's output and file."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sparkdist import Launcher, TrainingFailed
from sparkdist.driver.control import ControlChannel
from sparkdist.errors import ConfigurationError
from tests import support


def launch(function, *args, **settings):
    settings = {"num_processes": 2, "local_mode": True, "timeout": 60, **settings}
    return Launcher("plain", **settings).launch(function, *args)


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def talk():
    rank = os.environ["RANK"]
    log = logging.getLogger("my.model")
    log.setLevel(logging.INFO)
    log.info("epoch %d of %d", 1, 3)
    log.debug("unheard")
    try:
        raise ValueError("bad\nthing \ud800")
    except ValueError:
        log.exception("it failed on %s", rank)
    log.warning("%d", "no number")
    return rank


def test_python_logging_as_json_lines(clean, tmp_path):
    path = tmp_path / "run.jsonl"
    before = time.time()
    results = launch(talk, logs_json=path)
    for rank in (0, 1):
        told = [record for record in records(path) if record["rank"] == rank]
        assert [record["level"] for record in told] == ["INFO", "ERROR", "WARNING"]
        assert told[0]["message"] == "epoch 1 of 3"
        assert told[0]["logger"] == "my.model"
        assert told[0]["run_id"] == results.run_id
        assert told[0]["attempt"] == 0
        assert "ValueError: bad" in str(told[1]["exception"])
        assert "no number" in str(told[2]["message"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert str(records(path)[0]["time"]) >= time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(before - 1))


def test_basic_config_is_still_the_users(clean, tmp_path, capfd):
    def configured():
        logging.basicConfig(format="mine: %(message)s")
        logging.warning("hello")

    launch(configured, num_processes=1, logs_json=tmp_path / "a")
    assert "[rank 0] mine: hello" in capfd.readouterr().err
    assert [record["message"] for record in records(tmp_path / "a")] == ["hello"]


def test_many_threads_signals_and_forks_keep_lines_whole(clean, tmp_path):
    def busy():
        logging.getLogger().addHandler(logging.NullHandler())  # stderr cannot be written to from a signal
        signal.signal(signal.SIGALRM, lambda *_: logging.warning("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

        def talk_much():
            for _ in range(50):
                logging.warning("x" * 9000)

        threads = [threading.Thread(target=talk_much) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        pid = os.fork()
        if pid == 0:
            try:
                logging.warning("from a child")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    launch(busy, num_processes=1, logs_json=tmp_path / "a", logs="none")
    told = [str(record["message"]) for record in records(tmp_path / "a")]
    assert told.count("x" * 9000) == 200
    assert "from a child" not in told


def test_records_of_a_script_under_torchrun(clean, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import logging, os\nlogging.warning('in %s', os.environ['RANK'])\n")
    settings = {"local_mode": True, "launcher": "torchrun", "logs_json": tmp_path / "a"}
    Launcher("torch", num_processes=2, **settings).run(str(script))
    assert sorted(str(record["message"]) for record in records(tmp_path / "a")) == ["in 0", "in 1"]


def test_a_progress_bar_is_seen_while_it_is_drawn(clean, tmp_path, capfd):
    def draw():
        sys.stderr.write("halfway 50%\r")
        sys.stderr.flush()
        while not (tmp_path / "seen").exists():
            time.sleep(0.01)
        sys.stderr.write("halfway 100%\n")

    run = threading.Thread(target=launch, args=[draw], kwargs={"num_processes": 1})
    run.start()
    seen = ""
    deadline = time.monotonic() + 30
    while "50%" not in seen and time.monotonic() < deadline:
        seen += capfd.readouterr().err
    (tmp_path / "seen").touch()
    run.join()
    assert "[rank 0] halfway 50%\n" in seen
    assert "[rank 0] halfway 100%\n" in capfd.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigurationError, match="logs_json"):
        launch(talk, logs_json="/proc/sparkdist.jsonl")


def test_the_last_hundred_lines_of_the_failing_rank(clean):
    def fail():
        if os.environ["RANK"] == "1":
            for number in range(150):
                print("line", number, file=sys.stderr if number % 2 else sys.stdout)
            raise ValueError("no")
        time.sleep(30)

    with pytest.raises(TrainingFailed) as caught:
        launch(fail, logs="none")
    tail = caught.value.failures[1].log_tail
    assert len(tail) == 100
    assert "line 149" in tail


def test_any_bytes_and_a_line_that_never_ends(clean, capfd):
    def odd():
        os.write(1, b"\xff\xfe caf\xc3\xa9 \x00 \x1b[31mred\x07\n")
        os.write(1, b"10%\r50%\r100%\n")
        os.write(1, b"y" * 200_000)

    launch(odd, num_processes=1)
    out = capfd.readouterr().out
    assert "[rank 0] \\xff\\xfe café \\x00 \\x1b[31mred\\x07\n" in out
    assert "[rank 0] 100%\n" in out
    assert out.count("y") == 200_000
    assert max(map(len, out.splitlines())) < 140_000


def test_a_signal_handler_that_raises_while_a_record_is_told(clean, tmp_path):
    def busy():
        logging.getLogger().addHandler(logging.NullHandler())

        is_due = False

        def expire(*_):
            nonlocal is_due
            if is_due:
                is_due = False
                raise TimeoutError

        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        expired = 0
        while expired < 20:
            try:
                is_due = True
                while is_due:  # no more where logging itself has caught it
                    logging.warning("x" * 9000)
            except TimeoutError:
                expired += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        logging.warning("the end")
        return expired

    assert launch(busy, num_processes=1, logs_json=tmp_path / "a", logs="none").values == [20]
    told = [str(record["message"]) for record in records(tmp_path / "a")]
    assert told[-1] == "the end" and set(told[:-1]) == {"x" * 9000}


def test_a_line_is_split_between_characters(clean, capfd):
    def long():
        sys.stdout.write("é" * 100_000 + "\nshort\n")

    launch(long, num_processes=1)
    out = capfd.readouterr().out
    assert out.count("é") == 100_000 and "\\x" not in out
    assert max(len(line.encode()) for line in out.splitlines()) <= (1 << 16) + len("[rank 0] ")


@pytest.mark.parametrize("local_mode", [True, False], ids=["driver", "spark"])
def test_a_connection_that_is_reset_costs_lines_and_not_the_training(
    local_mode, spark, clean, capfd, monkeypatch
):
    take = ControlChannel._take

    def take_until_lines_come(self, header, body):
        if header["kind"] == "log":
            raise ConnectionResetError  # the socket is closed with something in it: a reset
        take(self, header, body)

    monkeypatch.setattr(ControlChannel, "_take", take_until_lines_come)

    def talk():
        for number in range(2000):
            print("line", number, flush=True)
            time.sleep(0.0005)
        return "trained"

    with pytest.warns(UserWarning, match=r"spark\.driver\.host"):
        assert launch(talk, local_mode=local_mode).values == ["trained"] * 2
    out = capfd.readouterr().out.splitlines()
    for rank in range(2):
        numbers = [int(line.split()[-1]) for line in out if line.startswith(f"[rank {rank}] line")]
        assert len(numbers) > 1000
        assert numbers == list(range(numbers[0], 2000))  # what was lost is what had been on its way


def test_a_driver_that_is_frozen_for_a_while(tmp_path, clean):
    source = """
import os, sys, time
from sparkdist import Launcher

def talk(folder):
    for number in range(4000):
        print("line", number, "x" * 5000, flush=True)
    open(f"{folder}/said", "w").close()
    return 1

print(Launcher("plain", num_processes=1, local_mode=True, timeout=60).run(talk, sys.argv[1]))
"""
    command = [sys.executable, "-c", source, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with (tmp_path / "out").open("wb") as out:
        driver = subprocess.Popen(command, stdout=out, env=environ)
    try:
        assert support.wait_until(lambda: (tmp_path / "out").stat().st_size > 0, 30)
        driver.send_signal(signal.SIGSTOP)
        # 20 MB of lines: the rank gets rid of them though nobody takes them.
        assert support.wait_until((tmp_path / "said").exists, 30)
        driver.send_signal(signal.SIGCONT)
        assert driver.wait(60) == 0
    finally:
        driver.kill()
        driver.wait()
    lines = (tmp_path / "out").read_text().splitlines()
    said = [int(line.split()[3]) for line in lines if line.startswith("[rank 0] line")]
    dropped = [int(line.split()[3]) for line in lines if line.startswith("[rank 0] ...")]
    assert lines[-1] == "1"
    assert said == sorted(set(said)) and said[-1] == 3999
    assert len(said) + sum(dropped) == 4000
