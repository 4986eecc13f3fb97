"""hvd.elastic over attempts of the engine: what was committed is there again, with real Horovod."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sparkdist import Launcher, TrainingFailed, context
from sparkdist.executor.kept import Kept, sweep
from tests import support

pytestmark = pytest.mark.usefixtures("clean")

BATCHES = 6


def train(commits: int, dies_at: int, width: int = 4, uses_torch: bool = True) -> dict[str, Any]:
    """Trains; in the first attempt rank 1 kills itself, and only the first batches are committed."""
    import horovod.torch as hvd
    import torch
    from horovod.common.elastic import ObjectState

    hvd.init()
    torch.manual_seed(hvd.rank() + 10 * context().attempt)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if uses_torch:
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, history=[])
    else:
        state = ObjectState(hvd.broadcast_object, hvd.rank, batch=0, history=[])
    told: list[tuple[int, int]] = []
    state.register_reset_callbacks([lambda: told.append((hvd.size(), state.batch))])

    @hvd.elastic.run
    def loop(state: Any) -> dict[str, Any]:
        began = state.batch, float(model.weight.detach().double().sum())
        while state.batch < BATCHES:
            if state.batch == dies_at and context().attempt == 0 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(1, width)).sum().backward()
            for parameter in model.parameters():
                parameter.grad = hvd.allreduce(parameter.grad)
            optimizer.step()
            weight = float(model.weight.detach().double().sum())
            state.history = [*state.history, (context().attempt, state.batch, weight)]
            state.batch += 1
            if state.batch <= commits or context().attempt:
                state.commit()
        return {"began": began, "history": state.history, "told": told}

    found: dict[str, Any] = loop(state)
    return found


def launch(*args: Any, ranks: int = 2, **settings: Any) -> list[Any]:
    settings = {"max_restarts": 1, "timeout": 60, **settings}
    results = Launcher("horovod", num_processes=ranks, **settings).launch(train, *args)
    first = results.attempts[0].failure
    assert first is not None and (first.rank, first.signal) == (1, "SIGKILL")
    return results.values


@pytest.mark.parametrize(
    "uses_torch", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["TorchState", "ObjectState"]
)
def test_training_goes_on_from_the_last_commit(spark, uses_torch):
    one, other = launch(3, 4, 4, uses_torch)
    assert one["history"] == other["history"] or not uses_torch
    steps = [(attempt, batch) for attempt, batch, _ in one["history"]]
    # The fourth batch was trained, but not committed.
    assert steps == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert one["began"][0] == other["began"][0] == 3 and not one["told"]
    if uses_torch:
        assert one["began"][1] == other["began"][1] == one["history"][2][2]


@pytest.mark.slow
def test_without_a_commit_training_starts_from_scratch(spark):
    for found in launch(0, 2):
        assert [step[:2] for step in found["history"]] == [(1, batch) for batch in range(BATCHES)]


@pytest.mark.slow
def test_a_state_of_some_megabytes(spark):
    one, other = launch(1, 1, 2500)  # 25 MB of weights, and as much of momentum
    assert one["began"] == other["began"] == (1, one["history"][0][2])


def keep(fails: bool) -> list[str]:
    there = sorted(path.name for path in context().kept.iterdir())
    (context().kept / f"{context().attempt}-{context().rank}").touch()
    assert context().kept.stat().st_mode & 0o777 == 0o700
    if context().attempt == 0 or fails:
        raise LookupError(str(context().kept))
    return there


@pytest.mark.parametrize("local", [True, False])
def test_what_ranks_keep_is_there_for_the_next_attempt_and_then_gone(spark, local):
    assert Launcher("plain", local_mode=local, max_restarts=1).run(keep, False) == ["0-0"]


@pytest.mark.parametrize("local", [True, False])
def test_without_another_attempt_nothing_is_kept(spark, local):
    with pytest.raises(TrainingFailed):
        Launcher("plain", local_mode=local, max_preemptions=0).run(keep, True)


def test_after_the_last_attempt_it_is_kept_for_as_long_as_another_could_take(spark):
    with pytest.raises(TrainingFailed) as caught:
        Launcher("plain", max_restarts=1).run(keep, True)
    kept = Path(caught.value.root.message)
    assert sorted(path.name for path in kept.iterdir()) == ["0-0", "1-0"]
    assert kept.name.endswith(f"-{600 + 30 + 60}")

    def has_expired() -> bool:
        ago = time.time() - 600 - 30 - 60
        with suppress(FileNotFoundError):  # again and again: its agent notes when it has left it
            os.utime(kept, (ago, ago))
        return not kept.exists()

    assert support.wait_until(has_expired, 5)


def test_a_folder_in_use_does_not_expire_and_an_empty_one_is_not_kept(tmp_path):
    kept, again = Kept(tmp_path, "run", 1), Kept(tmp_path, "run", 1)
    (kept.path / "file").touch()
    kept.leave()
    os.utime(kept.path, (0, 0))
    assert sweep(tmp_path) and kept.path.stat().st_mtime > 0
    again.leave()
    os.utime(kept.path, (0, 0))
    assert not sweep(tmp_path) and not kept.path.exists()
    empty = Kept(tmp_path, "other", 60)
    empty.leave()
    assert not sweep(tmp_path) and not empty.path.exists()


def test_a_killed_agent_leaves_what_ranks_keep(spark):
    def lose_the_agent() -> list[str]:
        there = [path.name for path in context().kept.iterdir()]
        (context().kept / "mine").touch()
        if context().attempt == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        return there

    assert Launcher("plain", max_restarts=1).run(lose_the_agent) == ["mine"]
