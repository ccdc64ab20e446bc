"""Train a small network in the pods of Kubernetes; see README.md in this folder.

On a single process it trains too:

    $ python examples/kubernetes/train.py --steps 200
    step 1: rank 0 of 1
    step 200: over, loss 0.490020
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal import elastic


def make(checkpoint: Path | None) -> tuple[nn.Module, torch.optim.Optimizer, elastic.State]:
    """Return the model, its optimizer, and the state of the training, from the checkpoint if it exists."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    samples = elastic.Samples(1000, batch=60, seed=0)
    state = elastic.State(model=net, optimizer=optimizer, samples=samples, loss=0.0)
    if checkpoint is not None and checkpoint.exists():
        state.load(checkpoint)
    return net, optimizer, state


def train(options: argparse.Namespace) -> None:
    # Pods of a Deployment meet in the session. Pods of an Indexed Job meet here first, so that all load the
    # same checkpoint: no rank 0 of an earlier start can replace it any more.
    group = None if os.environ.get("SHOAL_JOIN") else shoal.init()
    net, optimizer, state = make(options.checkpoint)
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)).double()
    y = torch.sin(x.sum(1, keepdim=True))
    with elastic.Session(state, group=group, min_size=options.min) as session:
        model = session.parallel(net)
        size = 0
        for step in session.steps(until=options.steps):
            with step:
                loss = nn.functional.mse_loss(model(x[step.indices]), y[step.indices])
                (loss * step.weight).backward()
                step.commit()
                optimizer.step()
                optimizer.zero_grad()
            if session.group.size != size:
                size = session.group.size
                print(f"step {state.steps}: rank {session.group.rank} of {size}", flush=True)
            if state.steps % options.every == 0:
                save(state, session, options.checkpoint)
        if not session.left or session.group.state == "open":
            save(state, session, options.checkpoint)  # at the end, or if all ranks must stop
        with torch.no_grad():
            state.loss = nn.functional.mse_loss(net(x), y).item()
        print(f"step {state.steps}: over, loss {state.loss:.6f}", flush=True)
    if group is not None:
        group.close()


def save(state: elastic.State, session: elastic.Session, checkpoint: Path | None) -> None:
    if checkpoint is not None and session.group.rank == 0:
        state.save(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--min", type=int, default=1, help="minimum number of ranks for training")
    parser.add_argument("--checkpoint", type=Path, help="file to load at the start and to save to")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    train(options)


if __name__ == "__main__":
    main()
