"""A small CNN on scikit-learn's handwritten digits, trained by as many ranks as there are.

A plain script for torchrun; it knows nothing of Spark:

    torchrun --standalone --nproc-per-node=2 examples/train_digits.py

`main` is the same training as a function.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TEST_SHARE = 0.2


def main(epochs: int = 8, batch_size: int = 32, learning_rate: float = 0.01, seed: int = 0) -> float:
    """Trains the model and returns its accuracy on the test set, the same on every rank.

    Args:
        epochs: Passes over the training set.
        batch_size: Images per step and rank.
        learning_rate: Adam's, at the peak of one cycle from low to high to nearly zero.
        seed: Of the split, the model's start and the order of the images.
    """
    dist.init_process_group("gloo")
    try:
        return _train(epochs, batch_size, learning_rate, seed)
    finally:
        dist.destroy_process_group()


def _train(epochs: int, batch_size: int, learning_rate: float, seed: int) -> float:
    torch.manual_seed(seed)
    train, (test_images, test_labels) = split(seed)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train, seed=seed)
    loader = DataLoader(train, batch_size=batch_size, sampler=sampler)
    model = DistributedDataParallel(digit_network())
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, epochs=epochs, steps_per_epoch=len(loader)
    )
    share = slice(dist.get_rank(), None, dist.get_world_size())
    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(())
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        accuracy = evaluate(model, test_images[share], test_labels[share])
        if dist.get_rank() == 0:
            # Flushed, for a pipe would hold the lines back until the end.
            loss_text = f"loss {total.item() / len(loader):.4f}"
            print(f"epoch {epoch:2}/{epochs}  {loss_text}  test accuracy {accuracy:.2%}", flush=True)
    return accuracy


def split(seed: int) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Returns the training set and the test images (n, 1, 8, 8) with their labels (n)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = int(len(labels) * TEST_SHARE)
    test, train = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), (images[test], labels[test])


def digit_network() -> nn.Module:
    """Returns the model: images (n, 1, 8, 8) to scores (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def evaluate(model: DistributedDataParallel, images: Tensor, labels: Tensor) -> float:
    """Returns the accuracy over the shares of all ranks; each passes its own, of any size."""
    model.eval()
    # One pass per rank, and through DDP: it gives every rank the batch statistics of rank 0 first.
    correct = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.stack([correct, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.97, help="fail below this test accuracy")
    args = parser.parse_args()
    reached = main(args.epochs, args.batch_size, args.learning_rate, args.seed)
    if reached < args.target:
        sys.exit(f"test accuracy {reached:.2%} is below the target of {args.target:.2%}")
