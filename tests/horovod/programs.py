"""What ranks of Horovod run in tests of more than one place."""

from __future__ import annotations

import os
from typing import Any


def collectives(scale: float = 1.0) -> tuple[list[int], dict[str, Any]]:
    """Runs one collective of each kind; returns where the rank stands, and what they gave."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    mine = torch.full((2,), scale * (hvd.rank() + 1))
    uneven = torch.full((hvd.rank() + 1,), float(hvd.rank()))
    found = {
        "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
        "average": hvd.allreduce(mine).tolist(),
        "gathered": hvd.allgather(uneven).tolist(),
        "broadcast": hvd.broadcast(mine, root_rank=1).tolist(),
        "object": hvd.broadcast_object({"from": hvd.rank()}, root_rank=1),
    }
    where = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    return where, found


def expected(size: int, scale: float = 1.0) -> dict[str, Any]:
    """Returns what the collectives give on so many ranks."""
    total = scale * size * (size + 1) / 2
    return {
        "sum": [total] * 2,
        "average": [total / size] * 2,
        "gathered": [float(rank) for rank in range(size) for _ in range(rank + 1)],
        "broadcast": [2 * scale] * 2,
        "object": {"from": 1},
    }


def places(nodes: int, each: int) -> list[list[int]]:
    """Returns where the ranks stand, on so many nodes of so many ranks each."""
    return [
        [node * each + local, nodes * each, local, each, node, nodes]
        for node in range(nodes)
        for local in range(each)
    ]


def interface() -> str:
    """Returns the network interface that Horovod uses in this rank."""
    return os.environ["HOROVOD_GLOO_IFACE"]
