"""A way to start ranks: a launcher at a place. What the fixtures of conftest.py hand out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkdist import Results, TorchDistributor, TrainingFailed
from tests import support
from tests.faults import programs

PROMPT = 5.0  # s from a rank's fault to the driver's error


@dataclass(frozen=True)
class Way:
    """One way to start ranks.

    Attributes:
        launcher, local_mode: The settings.
        moment: A file that a rank touches when its fault happens.
        ranks: How many ranks it starts.
    """

    launcher: str
    local_mode: bool
    moment: Path
    ranks: int = 2

    def launch(self, program: Any, *args: Any, num_processes: int = 0, **settings: Any) -> Results:
        """Launches a function or a script; a fault test that hangs fails after a minute."""
        settings = {"launcher": self.launcher, "timeout": 60, **settings}
        distributor = TorchDistributor(num_processes or self.ranks, local_mode=self.local_mode, **settings)
        return distributor.launch(program, *args)

    def failure(self, program: Any, *args: Any, **settings: Any) -> TrainingFailed:
        """Launches what must fail."""
        with pytest.raises(TrainingFailed) as caught:
            self.launch(program, *args, **settings)
        return caught.value

    def failure_of_rank_1(self, fault: Callable[..., Any], *args: Any) -> TrainingFailed:
        """Launches a fault in rank 1 where the others wait for it; the error must come promptly."""
        # A fresh interpreter, torchrun's kind, takes seconds to import torch; sleeping costs nothing.
        beside = programs.beside_a_collective if self.launcher == "fast" else programs.beside_a_sleeper
        return self.failure_beside(beside, fault, *args)

    def failure_beside(
        self, beside: Callable[..., Any], fault: Callable[..., Any], *args: Any
    ) -> TrainingFailed:
        """Launches a fault in rank 1 beside what the others do."""
        error = self.failure(beside, self.moment, fault, *args)
        assert time.time() - os.stat(self.moment).st_mtime < PROMPT
        assert error.root.rank == 1
        assert str(error).startswith("rank 1 ")
        return error


class Running:
    """A run whose ranks are in their function.

    Attributes:
        outcome: What becomes of it.
        go: A file that lets the ranks return.
        ranks: The ranks' pids.
        agent, forkserver: The processes above them.
    """

    def __init__(self, outcome: Future[Results], folder: Path, count: int) -> None:
        self.outcome = outcome
        self.go = folder / "go"
        names = [str(rank) for rank in range(count)]
        assert support.wait_until(lambda: set(names) <= set(os.listdir(folder)), 60)
        self.ranks = {int((folder / name).read_text()) for name in names}
        self.agent = support.parents()[min(self.ranks)]
        self.forkserver = support.parents()[self.agent]

    def failure(self) -> TrainingFailed:
        """Waits for its error."""
        with pytest.raises(TrainingFailed) as caught:
            self.outcome.result(timeout=20)
        return caught.value

    def loss(self) -> TrainingFailed:
        """Waits for the error of a run that Spark has lost, or was made to lose."""
        error = self.failure()
        assert {failure.kind for failure in error.failures.values()} == {"lost"}
        assert "JVM stacktrace" not in str(error) and "\tat org.apache" not in str(error)
        return error

    def end(self, seconds: float) -> None:
        """Asserts that the ranks end within so many seconds."""
        gone = support.wait_until(lambda: not self.ranks & support.parents().keys(), seconds)
        assert gone, support.describe(self.ranks)


@contextmanager
def running(
    way: Way, folder: Path, first: Callable[[], object] = lambda: None, **settings: Any
) -> Iterator[Running]:
    """A run in a thread of its own, in which something else comes first."""

    def launch() -> Results:
        first()
        return way.launch(programs.announce_and_return, folder, folder / "go", **settings)

    with ThreadPoolExecutor(1) as pool:
        yield Running(pool.submit(launch), folder, settings.get("num_processes", way.ranks))
