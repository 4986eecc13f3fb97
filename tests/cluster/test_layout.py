"""Where ranks run and how they meet, on executors of their own."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkdist import Launcher, TorchDistributor
from tests.cluster.clusters import EXECUTORS, Cluster
from tests.faults import programs
from tests.faults.ways import Way

NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)


def observe() -> dict[str, Any]:
    """Tells where this rank is, by what the environment says and by what it sees itself."""
    parent = os.getppid()
    return {name: os.environ.get(name) for name in NAMES} | {
        "agent": parent,
        # A task's working folder is its executor's.
        "executor": os.getcwd(),
        "elastic": "TORCHELASTIC_RUN_ID" in os.environ,
    }


def observe_sockets() -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """The same, with the listening TCP sockets of this host as (address, port)."""
    import socket

    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            address, _, port = fields[1].partition(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return observe(), found


def numbers(seen: list[dict[str, Any]], name: str) -> list[int]:
    return [int(facts[name]) for facts in seen]


def check_layout(seen: list[dict[str, Any]], cluster: Cluster) -> None:
    ranks, each = list(range(cluster.slots)), cluster.cores
    assert numbers(seen, "RANK") == ranks
    assert numbers(seen, "GROUP_RANK") == [rank // each for rank in ranks]
    assert numbers(seen, "LOCAL_RANK") == [rank % each for rank in ranks]
    assert {facts["WORLD_SIZE"] for facts in seen} == {str(cluster.slots)}
    assert {facts["LOCAL_WORLD_SIZE"] for facts in seen} == {str(each)}
    assert {facts["GROUP_WORLD_SIZE"] for facts in seen} == {str(EXECUTORS)}
    assert all(facts["elastic"] for facts in seen)
    check_places(seen, cluster, "executor")


def check_places(seen: list[dict[str, Any]], cluster: Cluster, name: str) -> None:
    """A node's ranks share it, and no other node's rank does."""
    places = [facts[name] for facts in seen]
    assert places == [places[rank - rank % cluster.cores] for rank in range(cluster.slots)]
    assert len(set(places)) == EXECUTORS


def test_ranks_are_numbered_executor_by_executor(way: Way, cluster: Cluster):
    seen = way.launch(observe).values
    check_layout(seen, cluster)
    check_places(seen, cluster, "agent")


@pytest.mark.slow
def test_torchruns_ranks_are_numbered_executor_by_executor(way: Way, cluster: Cluster):
    check_layout(way.launch(observe, launcher="torchrun").values, cluster)


@pytest.mark.slow
def test_spark_deals_partitions_in_any_order(way: Way, cluster: Cluster):
    """However the tasks fell, a node's ranks follow each other."""
    for _ in range(6):
        seen = Launcher("plain", num_processes=cluster.slots, timeout=60).launch(observe).values
        places = [facts["executor"] for facts in seen]
        assert places == sorted(places, key=places.index)
        assert len(set(places)) == EXECUTORS


def test_fewer_ranks_than_slots(way: Way, cluster: Cluster):
    for count in range(1, cluster.slots):
        results = way.launch(observe, num_processes=count)
        seen = results.values
        assert numbers(seen, "RANK") == list(range(count))
        nodes = numbers(seen, "GROUP_RANK")
        assert [rank.node for rank in results.ranks] == nodes == sorted(nodes)
        for node in set(nodes):
            mine = [facts for facts in seen if int(facts["GROUP_RANK"]) == node]
            assert numbers(mine, "LOCAL_RANK") == list(range(len(mine)))
            assert {facts["LOCAL_WORLD_SIZE"] for facts in mine} == {str(len(mine))}
            assert len({facts["agent"] for facts in mine}) == 1


def test_the_store_listens_on_the_gangs_interface_only(way: Way):
    values = way.launch(observe_sockets).values
    ((address, port),) = {(facts["MASTER_ADDR"], int(facts["MASTER_PORT"])) for facts, _ in values}
    for facts, sockets in values:
        assert [listener for listener in sockets if listener[1] == port] == [(address, port)]
        # All executors of these clusters are on this host.
        assert (facts["GLOO_SOCKET_IFNAME"], facts["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert address == "127.0.0.1"


# --- training -----------------------------------------------------------------------------------


def reduce_ranks() -> tuple[float, list[Any]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, dist.get_rank())
    dist.destroy_process_group()
    return total.item(), told


def train() -> tuple[float, float, list[float]]:
    """Fits a line by DDP; every rank sees points of its own."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    x = torch.linspace(-1, 1, 32).reshape(-1, 1)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), 3 * x + dist.get_rank())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [p.item() for p in model.parameters()]
    dist.destroy_process_group()
    return losses[0], losses[-1], weights


def check_training(values: list[Any]) -> None:
    for first, last, weights in values:
        assert last < first
        assert weights == values[0][2]
    slope, offset = values[0][2]
    assert abs(slope - 3) < 0.2
    assert abs(offset - (len(values) - 1) / 2) < 0.1  # the mean of what ranks saw


def test_collectives(way: Way, cluster: Cluster):
    ranks = list(range(cluster.slots))
    assert way.launch(reduce_ranks).values == [(sum(ranks) + len(ranks), ranks)] * len(ranks)


def test_ddp(way: Way):
    check_training(way.launch(train).values)


def as_script(function: Callable[[], Any], folder: Path) -> Path:
    """A script that writes a function's value to a file of its rank's own."""
    path = folder / "train.py"
    path.write_text(
        f"import json, os\n\n{inspect.getsource(function)}\n"
        f"with open(os.path.join({str(folder)!r}, os.environ['RANK']), 'w') as file:\n"
        f"    json.dump({function.__name__}(), file)\n"
    )
    return path


def test_a_ddp_script(either: Way, cluster: Cluster, moments: Path):
    assert either.launch(as_script(train, moments)).values == [None] * cluster.slots
    check_training([json.loads((moments / str(rank)).read_text()) for rank in range(cluster.slots)])


def test_any_python_function(way: Way, cluster: Cluster):
    """The `plain` framework: ranks, and no word of torch."""
    launcher = Launcher("plain", num_processes=cluster.slots, timeout=60)
    seen = launcher.launch(observe).values
    assert numbers(seen, "RANK") == list(range(cluster.slots))
    assert not any(facts["elastic"] or facts["MASTER_PORT"] for facts in seen)


def test_run_returns_rank_0s_value(way: Way, cluster: Cluster):
    distributor = TorchDistributor(cluster.slots, local_mode=False, timeout=60)
    assert distributor.run(programs.rank) == 0
    assert way.launch(programs.rank).values == list(range(cluster.slots))
