"""Train a small convolutional network on handwritten digits, on any number of ranks.

    $ shoal run -n 2 examples/digits.py
    [0] epoch 12/12 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━ loss 0.0067  test accuracy 99.2% 0:00:07
    [0] test accuracy 99.17 % (357 of 360 digits) after 12 epochs on 2 ranks
    [0] loss and accuracy over time: out/digits.png

On a single process it does the same, with the same network up to rounding:

    $ python examples/digits.py

The images are the 1,797 digits of 8 x 8 pixels that scikit-learn ships (`sklearn.datasets.load_digits`),
written by 43 people. Each step takes `--batch` of them, distributed over the ranks; each rank computes the
gradient of its part, and DistributedDataParallel averages the gradients.

The order in which a gradient's terms are added depends on the number of ranks. In single precision the
rounding errors grow within a few epochs into different networks of equal quality. With double precision, used
here, loss and accuracy are the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy

import shoal


@dataclass(frozen=True)
class Digits:
    """Images [n, 1, 8, 8] with values from 0 to 1, and their labels."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


@dataclass
class History:
    """The mean loss of each epoch, and the test accuracy after it (0 to 1)."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


def load() -> Digits:
    """Load the digits, four fifths for training, with a fixed split."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )

    def as_images(x) -> torch.Tensor:
        return torch.as_tensor(x, dtype=torch.float64).reshape(-1, 1, 8, 8) / 16

    return Digits(as_images(train_x), torch.as_tensor(train_y), as_images(test_x), torch.as_tensor(test_y))


def make_network(seed: int) -> nn.Module:
    """Create a network of 38,282 parameters, in double precision (see the top of this file).

    Without batch normalization, whose statistics would depend on the number of ranks.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).double()


def train(
    group: shoal.ProcessGroup,
    network: nn.Module,
    digits: Digits,
    *,
    epochs: int,
    batch: int,
    seed: int,
    progress: Progress | None = None,
) -> History:
    """Train ``network`` in place; ``batch`` is the total number of images per step on all ranks."""
    model = shoal.DistributedDataParallel(network, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    shuffle = torch.Generator().manual_seed(seed)
    count = len(digits.train_labels)
    history = History()
    task = None if progress is None else progress.add_task("training", total=epochs, news="")
    for _ in range(epochs):
        loss_sum = torch.zeros((), dtype=torch.float64)
        for step in torch.randperm(count, generator=shuffle).split(batch):
            mine = step[group.rank :: group.size]
            loss = cross_entropy(model(digits.train_images[mine]), digits.train_labels[mine], reduction="sum")
            # DDP averages gradients over ranks. With this factor the average is the gradient of the mean loss
            # over the whole batch, even if the ranks' parts differ in size.
            optimizer.zero_grad()
            (loss * group.size / len(step)).backward()
            optimizer.step()
            loss_sum += loss.detach()
        schedule.step()
        history.loss.append(group.all_reduce(loss_sum).wait().item() / count)
        history.accuracy.append(evaluate(group, model, digits))
        if progress is not None and task is not None:
            news = f"loss {history.loss[-1]:.4f}  test accuracy {history.accuracy[-1]:.1%}"
            progress.update(task, advance=1, news=news)
    return history


@torch.no_grad()
def evaluate(group: shoal.ProcessGroup, model: nn.Module, digits: Digits) -> float:
    """Return the share of test images that ``model`` classifies correctly; each rank evaluates its part."""
    model.eval()
    answers = model(digits.test_images[group.rank :: group.size]).argmax(dim=1)
    model.train()
    right = (answers == digits.test_labels[group.rank :: group.size]).sum()
    return group.all_reduce(right).wait().item() / len(digits.test_labels)


def draw(history: History, path: Path) -> None:
    """Plot loss and accuracy over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    epochs = range(1, len(history.loss) + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(epochs, history.loss, marker="o", color="tab:blue")
    left.set(title="training loss", xlabel="epoch", ylabel="mean cross entropy", yscale="log")
    right.plot(epochs, [100 * value for value in history.accuracy], marker="o", color="tab:green")
    right.axhline(97, linestyle=":", color="grey")
    right.set(title="test accuracy", xlabel="epoch", ylabel="%")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per step on all ranks together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial network and the order")
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="picture to write")
    options = parser.parse_args()

    with shoal.init() as group:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // group.size))
        first = group.rank == 0
        digits = load()
        console = Console(quiet=not first)
        columns = (
            "epoch {task.completed}/{task.total}",
            BarColumn(),
            "{task.fields[news]}",
            TimeElapsedColumn(),
        )
        disable = not (first and console.is_terminal)
        with Progress(*columns, console=console, disable=disable) as progress:
            history = train(
                group,
                make_network(options.seed),
                digits,
                epochs=options.epochs,
                batch=options.batch,
                seed=options.seed,
                progress=progress,
            )
        if first:
            share, count = history.accuracy[-1], len(digits.test_labels)
            console.print(
                f"test accuracy {100 * share:.2f} % ({round(share * count)} of {count} digits) "
                f"after {options.epochs} epochs on {group.size} rank{'s' * (group.size > 1)}",
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
