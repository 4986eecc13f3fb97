"""Ranks that come and go at different times: no fault at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests import support
from tests.faults import programs
from tests.faults.ways import Way, running


def test_one_rank_returns_early_and_the_other_trains_on(lean: Way, tmp_path: Path):
    """The gang's store outlives rank 0's process."""
    assert lean.launch(programs.return_early, tmp_path).values == ["early", "still there"]


def test_one_rank_starts_late(fast: Way, tmp_path: Path):
    assert fast.launch(
        programs.meet, programs.Unpickled(programs.come_late, tmp_path / "waiting")
    ).values == [2.0, 2.0]


def test_one_rank_is_frozen_for_a_while(fast: Way, tmp_path: Path):
    with running(fast, tmp_path) as run:
        frozen = max(run.ranks)
        os.kill(frozen, signal.SIGSTOP)
        run.go.touch()
        others = run.ranks - {frozen}
        assert support.wait_until(lambda: not others & support.parents().keys(), 10)
        os.kill(frozen, signal.SIGCONT)
        assert run.outcome.result(timeout=20).values == [0, 1]
