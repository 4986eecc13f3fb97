"""Real training by two ranks on Spark: what frameworks promise under torchrun holds here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparkdist import TorchDistributor

RANKS = 2
STEPS = 30


@pytest.fixture
def launch(spark, clean):
    """Launches on two ranks of a Spark session and returns every rank's value."""

    def on_spark(function, *args):
        distributor = TorchDistributor(RANKS, local_mode=False, use_gpu=False, timeout=100)
        return distributor.launch(function, *args).values

    return on_spark


def line():
    """A rank's own half of the points of a line: neither half alone gives the whole line's fit."""
    rank = dist.get_rank()
    x = torch.linspace(-1, 1, 64).reshape(RANKS, 32, 1)[rank]
    return x, 3 * x + 2 + 0.1 * rank


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


def fit(model, optimizer, x, y):
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check(values):
    """Every rank's (losses, weights): what a training of both together looks like."""
    assert len(values) == RANKS
    for losses, _ in values:
        assert losses[-1] < losses[0] / 2
    (first, first_weights), (second, second_weights) = values
    assert first != second  # they saw different data
    assert torch.equal(first_weights, second_weights)
    assert first_weights.abs().sum() > 0


def train_ddp(seed_by_rank):
    dist.init_process_group()
    # DDP gives all ranks the weights of rank 0.
    model = nn.parallel.DistributedDataParallel(network(dist.get_rank() if seed_by_rank else 0))
    x, y = line()
    losses = fit(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    found = weights(model)
    dist.destroy_process_group()
    return losses, found


def train_alone():
    """What two ranks together must come to: one process that averages both halves' gradients."""
    torch.manual_seed(0)
    model = network()
    x = torch.linspace(-1, 1, 64).reshape(RANKS, 32, 1)
    y = torch.stack([3 * x[rank] + 2 + 0.1 * rank for rank in range(RANKS)])
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    return weights(model)


def test_ddp(launch):
    values = launch(train_ddp, False)
    check(values)
    assert torch.allclose(values[0][1], launch(train_alone)[0], atol=1e-4)


def test_ddp_from_different_weights(launch):
    check(launch(train_ddp, True))


def train_fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, y = line()
    losses = fit(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    shares = [p.to_local().numel() for p in model.parameters()]
    whole = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    dist.destroy_process_group()
    return losses, whole, sum(shares)


def test_fsdp2(launch):
    values = launch(train_fsdp2)
    check([(losses, whole) for losses, whole, _ in values])
    total = values[0][1].numel()
    shares = [share for _, _, share in values]
    assert sum(shares) == total and max(shares) < total  # each held a part of the model
    assert torch.allclose(values[0][1], launch(train_alone)[0], atol=1e-4)


def train_lightning(folder):
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()
            self.losses = []

        def training_step(self, batch):
            x, y = batch
            loss = nn.functional.mse_loss(self.model(x), y)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    # Lightning adds the DistributedSampler by itself.
    loader = DataLoader(TensorDataset(x, 3 * x + 2), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=STEPS // 2,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    line = Line()
    trainer.fit(line, loader)
    env = type(vars(trainer.strategy)["cluster_environment"]).__name__
    return line.losses, weights(line), (env, trainer.global_rank, trainer.world_size, trainer.global_step)


def test_lightning(launch, tmp_path):
    values = launch(train_lightning, str(tmp_path))
    check([(losses, found) for losses, found, _ in values])
    steps = (STEPS // 2) * 2  # two batches of 16 per rank in each epoch
    assert [facts for _, _, facts in values] == [
        ("TorchElasticEnvironment", rank, RANKS, steps) for rank in range(RANKS)
    ]


def train_accelerate():
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, 3 * x + 2), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(STEPS // 2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    facts = accelerator.process_index, accelerator.num_processes, accelerator.distributed_type.value
    seen = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    accelerator.end_training()
    return losses, weights(model), (*facts, seen)


def test_accelerate(launch):
    values = launch(train_accelerate)
    check([(losses, found) for losses, found, _ in values])
    assert [facts for _, _, facts in values] == [(rank, RANKS, "MULTI_CPU", [0, 1]) for rank in range(RANKS)]


def reduce_without_arguments():
    dist.init_process_group()
    ranks = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(ranks)
    found = dist.get_world_size(), dist.get_backend(), ranks.item()
    dist.destroy_process_group()
    return found


def test_a_process_group_from_no_arguments(launch):
    first, second = launch(reduce_without_arguments)
    assert first == second
    # torch's own name for "what fits each device", and gloo is what that means without GPUs.
    assert first in [(RANKS, "undefined", 1.0), (RANKS, "gloo", 1.0)]


def reduce_again_and_again():
    """Collectives in process groups one after another, each with keys of its own in the gang's store.

    Without, the second one races with what the first one left there, as it does under torchrun.
    """
    sums = []
    for count in range(20):
        store, rank, size = next(dist.rendezvous("env://"))
        dist.init_process_group("gloo", store=dist.PrefixStore(str(count), store), rank=rank, world_size=size)
        ranks = torch.tensor([float(rank + count)])
        dist.all_reduce(ranks)
        sums.append(ranks.item())
        dist.destroy_process_group()
    return sums


def free_models_after_their_groups():
    import weakref

    model = None
    for count in range(15):
        store, rank, size = next(dist.rendezvous("env://"))
        dist.init_process_group("gloo", store=dist.PrefixStore(str(count), store), rank=rank, world_size=size)
        model = nn.parallel.DistributedDataParallel(network())
        model(torch.ones(1, 1)).sum().backward()
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        model = None  # the reducer must not be the last to hold the group: torch's own then hangs at times
        assert group() is not None
    return "done"


def test_a_model_may_outlive_its_process_group(launch):
    assert launch(free_models_after_their_groups) == ["done"] * RANKS


def test_a_process_group_after_another(launch):
    assert launch(reduce_again_and_again) == [[2.0 * count + 1 for count in range(20)]] * RANKS


def exchange():
    """Every kind of collective that gloo has, and a tensor of objects."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([rank + 1.0]))
    sent = torch.tensor([7.0]) if rank == 0 else torch.zeros(1)
    dist.broadcast(sent, src=0)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    subgroup = dist.new_group([1])
    alone = dist.get_world_size(subgroup) if rank == 1 else None
    dist.destroy_process_group()
    return [t.item() for t in gathered], sent.item(), objects, alone


def test_collectives(launch):
    first, second = launch(exchange)
    assert first[:3] == second[:3] == ([1.0, 2.0], 7.0, [{"rank": 0}, {"rank": 1}])
    assert (first[3], second[3]) == (None, 1)


def load_with_workers():
    """A DataLoader with worker processes inside a rank, which is a fork of a fork itself."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group()
    data = TensorDataset(torch.arange(32))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=2)
    seen = sorted(int(x) for (batch,) in loader for x in batch)
    dist.destroy_process_group()
    return seen


def test_data_loaders_with_workers(launch):
    first, second = launch(load_with_workers)
    assert (first, second) == (list(range(0, 32, 2)), list(range(1, 32, 2)))
