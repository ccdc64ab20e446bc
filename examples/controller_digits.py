"""Train the network of `digits.py` from one process that controls workers.

    $ python examples/controller_digits.py --workers 2
    epoch 12/12 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━ loss 0.0067  test accuracy 99.2% 0:00:12
    test accuracy 99.17 % (357 of 360 digits) after 12 epochs on 2 nodes
    loss and accuracy over time: out/controller_digits.png

No launcher is needed: this program starts the workers and ends them. The network is on all nodes; each
computes the gradient of its part of a batch, and `place.average_` averages the gradients. A step is recorded:
from the third on it is a few commands, and the Python code of `step` does not run. Loss and accuracy are
those of `shoal run -n 2 examples/digits.py`, up to rounding.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from digits import Digits, History, draw, load, make_network
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from torch import nn
from torch.nn.functional import cross_entropy

import shoal


def parts(indices: torch.Tensor, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return every `count`-th index for each node, and weights; padding, for equal shapes, has weight 0."""
    length = -(-len(indices) // count)
    mine = [indices[node::count] for node in range(count)]
    filled = [torch.cat([each, each.new_zeros(length - len(each))]) for each in mine]
    weights = [(torch.arange(length) < len(each)).double() for each in mine]
    return filled, weights


def train(
    master: shoal.controller.Master,
    network: nn.Module,
    digits: Digits,
    *,
    epochs: int,
    batch: int,
    seed: int,
    progress: Progress | None = None,
) -> History:
    """Train `network`, which moves to all nodes; `batch` is the total number of images per step."""
    place = master.nodes
    network.to(place.device)
    images, labels = place.replicate(digits.train_images), place.replicate(digits.train_labels)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    shuffle = torch.Generator().manual_seed(seed)
    count = len(digits.train_labels)
    history = History()
    task = None if progress is None else progress.add_task("training", total=epochs, news="")
    loss_sum = torch.zeros((), dtype=torch.float64, device=place.device)

    @master.recorded
    def step(mine: list[torch.Tensor], weights: list[torch.Tensor], size: int) -> None:
        chosen = place.scatter(mine)
        losses = cross_entropy(network(images[chosen]), labels[chosen], reduction="none")
        loss = (losses * place.scatter(weights)).sum()
        optimizer.zero_grad()
        (loss * len(place) / size).backward()
        place.average_(parameter.grad for parameter in network.parameters())
        optimizer.step()
        loss_sum.add_(loss.detach())

    for _ in range(epochs):
        loss_sum.zero_()
        for indices in torch.randperm(count, generator=shuffle).split(batch):
            step(*parts(indices, len(place)), len(indices))
        schedule.step()
        history.loss.append(place.mean(loss_sum).item() * len(place) / count)
        history.accuracy.append(evaluate(place, network, digits))
        if progress is not None and task is not None:
            news = f"loss {history.loss[-1]:.4f}  test accuracy {history.accuracy[-1]:.1%}"
            progress.update(task, advance=1, news=news)
    return history


@torch.no_grad()
def evaluate(place: shoal.controller.Place, network: nn.Module, digits: Digits) -> float:
    """Return the share of test images that `network` classifies correctly; each node evaluates its part."""
    count = len(digits.test_labels)
    mine, weights = parts(torch.arange(count), len(place))
    images = place.scatter([digits.test_images[each] for each in mine])
    labels = place.scatter([digits.test_labels[each] for each in mine])
    network.eval()
    right = ((network(images).argmax(dim=1) == labels) * place.scatter(weights)).sum()
    network.train()
    return round(place.mean(right).item() * len(place)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits, on workers.")
    parser.add_argument("--workers", type=int, default=2, help="number of workers to start")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per step on all nodes together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial network and the order")
    parser.add_argument("--out", type=Path, default=Path("out/controller_digits.png"), help="picture file")
    options = parser.parse_args()

    with shoal.init_master_worker(workers=options.workers) as master:
        place, digits, console = master.nodes, load(), Console()
        columns = (
            "epoch {task.completed}/{task.total}",
            BarColumn(),
            "{task.fields[news]}",
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            history = train(
                master,
                make_network(options.seed),
                digits,
                epochs=options.epochs,
                batch=options.batch,
                seed=options.seed,
                progress=progress,
            )
        share, count = history.accuracy[-1], len(digits.test_labels)
        console.print(
            f"test accuracy {100 * share:.2f} % ({round(share * count)} of {count} digits) "
            f"after {options.epochs} epochs on {len(place)} node{'s' * (len(place) > 1)}",
            highlight=False,
            soft_wrap=True,
        )
        if find_spec("matplotlib") is None:
            console.print("no picture: matplotlib is not installed")
            return
        draw(history, options.out)
        console.print(f"loss and accuracy over time: {options.out}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
