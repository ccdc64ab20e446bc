"""After, with shoal's own API: handwritten digits without torch.distributed.

    shoal run -n 2 examples/migration/native.py

Runs on the CPU. A checkpoint is written after each epoch, and the next start resumes from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal


def digits() -> TensorDataset:
    """Return 1,797 images [64] with values from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, default=Path("out/digits.pt"))
    options = parser.parse_args()

    group = shoal.init()
    first = group.rank == 0
    data = digits()
    sampler = DistributedSampler(data, group.size, group.rank)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = shoal.DistributedDataParallel(network(), group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    done = 0
    if options.checkpoint.exists():
        state = torch.load(options.checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]
    group.barrier().wait()  # nobody writes a checkpoint before all have read it

    for epoch in range(done, options.epochs):
        sampler.set_epoch(epoch)
        metrics = torch.zeros(3)  # the loss, how many are right, how many there are
        for images, labels in loader:
            scores = model(images)
            loss = cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = (scores.argmax(dim=1) == labels).sum()
            metrics += torch.stack([loss.detach() * len(labels), right, torch.tensor(len(labels))])
        group.all_reduce(metrics).wait()
        if first:
            loss, right, count = metrics.tolist()
            print(f"epoch {epoch + 1}: loss {loss / count:.6f}, {right / count:.2%} right")
            options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epochs": epoch + 1}, options.checkpoint)

    group.close()


if __name__ == "__main__":
    main()
