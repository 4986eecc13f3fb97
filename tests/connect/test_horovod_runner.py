"""`HorovodRunner` on a session of Spark Connect."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdist import HorovodRunner
from sparkdist.horovod import log_to_driver

pytestmark = pytest.mark.usefixtures("ranks_work_after")


def train() -> Any:
    import horovod.torch as hvd
    import torch

    hvd.init()
    print("printed")
    log_to_driver(f"sent {hvd.rank()}")
    return hvd.rank(), float(hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum))


def test_np_ranks_and_what_they_send(capfd):
    assert HorovodRunner(np=2).run(train) == (0, 3.0)
    said = capfd.readouterr().out.splitlines()
    assert sorted(line for line in said if line.startswith("[rank ")) == [
        "[rank 0] sent 0",
        "[rank 1] sent 1",
    ]


def test_np_0_is_all_slots():
    with pytest.warns(DeprecationWarning, match="np=0"):
        runner = HorovodRunner(np=0)
    assert runner.run(train) == (0, 3.0)
