"""What ranks report, from any thread of theirs to the driver's results."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import sparkdist
from sparkdist import Launcher, Results, TrainingFailed
from sparkdist.driver.board import Board
from sparkdist.driver.control import ControlChannel


def launch(function: Any, *args: Any, **settings: Any) -> Results:
    settings = {"num_processes": 2, "local_mode": True, "timeout": 60, **settings}
    return Launcher("plain", **settings).launch(function, *args)


def steps(results: Results, rank: int) -> list[int | None]:
    return [report.step for report in results.metrics if report.rank == rank]


def train(count: int) -> None:
    for step in range(count):
        sparkdist.report({"loss": 1 / (step + 1), "rank": sparkdist.context().rank}, step=step)


@pytest.mark.parametrize("local_mode", [True, False], ids=["driver", "spark"])
def test_reports_are_in_the_results_in_their_order(local_mode, spark, clean):
    before = datetime.now(UTC)
    results = launch(train, 200, local_mode=local_mode)
    for rank in (0, 1):
        assert steps(results, rank) == list(range(200))
        mine = [report for report in results.metrics if report.rank == rank]
        assert mine[3].metrics == {"loss": 0.25, "rank": rank}
        assert mine[3].attempt == 0
        assert before <= mine[0].time <= mine[-1].time <= datetime.now(UTC)


def test_a_report_is_live(clean, tmp_path, monkeypatch):
    heard: list[Board] = []
    add = Board.add_reports

    def add_and_open(self, rank, reports):
        add(self, rank, reports)
        heard.append(self)
        (tmp_path / "heard").touch()

    def wait():
        sparkdist.report({}, step=7)
        while not (tmp_path / "heard").exists():
            time.sleep(0.01)

    monkeypatch.setattr(Board, "add_reports", add_and_open)
    results = launch(wait, num_processes=1)  # else it would wait until its timeout
    assert steps(results, 0) == [7] and list(heard[0].reported) == [0]


def number_kinds() -> None:
    import numpy as np
    import torch

    class Ours:
        def __float__(self) -> float:
            return 0.5

    sparkdist.report(
        {
            "float": 0.5,
            "int": 2**60,
            "bool": True,
            "nan": math.nan,
            "inf": -math.inf,
            "numpy": np.float32(0.5),
            "numpy bool": np.bool_(True),
            "array": np.array([[3]]),
            "tensor": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
            "ours": Ours(),
            "\ud800 \n\x1b": 1,
        },
        step=np.int64(3),
    )
    sparkdist.report({}, step=torch.tensor(4))
    sparkdist.report({f"metric {number}": number for number in range(5000)})  # far more than one write takes


@pytest.mark.filterwarnings("error")
def test_any_number_travels(clean):
    first, second, third = launch(number_kinds, num_processes=1).metrics
    assert math.isnan(first.metrics.pop("nan"))
    assert first.metrics == {
        "float": 0.5,
        "int": 2.0**60,
        "bool": 1.0,
        "inf": -math.inf,
        "numpy": 0.5,
        "numpy bool": 1.0,
        "array": 3.0,
        "tensor": 0.5,
        "ours": 0.5,
        "\ud800 \n\x1b": 1.0,
    }
    assert all(type(value) is float for value in first.metrics.values())
    assert (first.step, second.step, third.step) == (3, 4, None)
    assert (second.metrics, len(third.metrics)) == ({}, 5000)


def refusals() -> list[str]:
    import numpy as np
    import torch

    class Odd:
        shape = None

    wrong: list[tuple[Any, Any]] = [
        *(({"loss": value}, None) for value in ("0.5", b"1", None, 1j, [1], np.zeros(2), torch.zeros(3))),
        *(({"loss": value}, None) for value in (np.str_("1"), np.complex64(1), Odd(), float, 10**400)),
        ({3: 1.0}, None),
        ([("loss", 1.0)], None),
        (0.5, None),
        *(({}, step) for step in (-1, True, 1.0, "1", np.float32(1))),
    ]
    said = []
    for metrics, step in wrong:
        try:
            sparkdist.report(metrics, step)
            said.append(f"took {metrics!r} {step!r}")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def test_what_is_no_number_is_refused_by_its_name(clean):
    results = launch(refusals, num_processes=1)
    said = results.values[0]
    assert all("'loss' must be one number, not" in text for text in said[:12]), said
    assert "'0.5'" in said[0] and "zeros" not in said[5]
    assert "name of a metric must be a string, not 3" in said[12]
    assert all("metrics by name" in text for text in said[13:15])
    assert all("step must be" in text for text in said[15:]) and "not -1" in said[15]
    assert results.metrics == ()


def test_it_works_in_a_ranks_own_process_only(clean):
    def elsewhere():
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                sparkdist.report({"loss": 1.0})
            except RuntimeError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        with os.fdopen(reader) as stream:
            return stream.read()

    results = launch(elsewhere, num_processes=1)
    assert "child of rank 0" in results.values[0] and results.metrics == ()
    with pytest.raises(RuntimeError, match="this process is not a rank"):
        sparkdist.report({"loss": 1.0})


@pytest.mark.parametrize("with_records", [True, False])
def test_threads_and_signal_handlers_that_raise_leave_reports_whole(clean, tmp_path, with_records):
    large = {f"metric {number}": 0.125 for number in range(400)}  # takes several writes

    def busy():
        import logging

        logging.getLogger().addHandler(logging.NullHandler())

        def expire(*_):
            sparkdist.report({"in": 1.0})
            raise TimeoutError

        def report_much():
            for step in range(50):
                sparkdist.report(large, step=step)
                logging.warning("x" * 9000)

        signal.signal(signal.SIGALRM, expire)
        threads = [threading.Thread(target=report_much) for _ in range(3)]
        for thread in threads:
            thread.start()
        expired = 0
        while expired < 20:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003)
                while True:
                    sparkdist.report(large)
            except TimeoutError:
                expired += 1
        for thread in threads:
            thread.join()

    records = {"logs_json": tmp_path / "a"} if with_records else {}
    results = launch(busy, num_processes=1, logs="none", **records)
    assert all(report.metrics in (large, {"in": 1.0}) for report in results.metrics)
    assert sum(report.step is not None for report in results.metrics) == 150
    assert sum(report.metrics == {"in": 1.0} for report in results.metrics) == 20
    if with_records:
        assert (tmp_path / "a").read_text().count("x" * 9000) == 150


@pytest.mark.parametrize("how", [lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_the_last_report_of_a_rank_that_is_gone_at_once(clean, boards, how: Callable[[], None]):
    def vanish():
        sparkdist.report({"loss": 0.5}, step=3)
        how()

    with pytest.raises(TrainingFailed):
        launch(vanish, num_processes=1)
    assert [report.step for report in boards[-1].reports] == [3]


def test_of_each_rank_the_last_ten_thousand_are_kept(clean):
    def chat():
        rank = sparkdist.context().rank
        for step in range(10_050 if rank else 20):
            sparkdist.report({}, step=step)

    results = launch(chat)
    assert steps(results, 0) == list(range(20))
    assert steps(results, 1) == list(range(50, 10_050))


@pytest.mark.parametrize("local_mode", [True, False], ids=["driver", "spark"])
def test_reports_come_with_the_result_where_the_driver_cannot_be_reached(
    local_mode, spark, clean, monkeypatch
):
    def refuse(self, header, body):
        raise ConnectionResetError

    monkeypatch.setattr(ControlChannel, "_take", refuse)
    with pytest.warns(UserWarning, match=r"spark\.driver\.host"):
        results = launch(train, 200, local_mode=local_mode)
    assert [steps(results, rank) for rank in (0, 1)] == [list(range(200))] * 2


SCRIPT = """
import sparkdist
sparkdist.report({"loss": 0.5}, step=sparkdist.context().rank)
"""


@pytest.mark.parametrize("launcher", ["fast", "torchrun"])
def test_scripts(clean, tmp_path: Path, launcher):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    results = Launcher("torch", num_processes=2, local_mode=True, launcher=launcher).launch(script)
    assert sorted((report.rank, report.step) for report in results.metrics) == [(0, 0), (1, 1)]


def test_a_function_under_torchrun(clean):
    results = Launcher("torch", num_processes=1, local_mode=True, launcher="torchrun").launch(train, 3)
    assert steps(results, 0) == [0, 1, 2]
