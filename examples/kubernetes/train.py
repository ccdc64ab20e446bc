"""Train a small network in the pods of Kubernetes; README.md beside it says how.

Alone it trains too:

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
    """The model, its optimiser, and the state of the training: that of the checkpoint, if there is one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    samples = elastic.Samples(1000, batch=60, seed=0)
    state = elastic.State(model=net, optimizer=optimizer, samples=samples, loss=0.0)
    if checkpoint is not None and checkpoint.exists():
        state.load(checkpoint)
    return net, optimizer, state


def train(options: argparse.Namespace) -> None:
    # Alike pods find one another in the session; those of an Indexed Job meet first, so that all load the
    # same checkpoint: no earlier rank 0 can write another one now.
    group = None if os.environ.get("SHOAL_JOIN") else shoal.init()
    net, optimizer, state = make(options.checkpoint)
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)).double()
    y = torch.sin(x.sum(1, keepdim=True))
    with elastic.Session(state, group=group, min=options.min) as session:
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
            save(state, session, options.checkpoint)  # at the end, or where all were told to stop
        with torch.no_grad():
            state.loss = nn.functional.mse_loss(net(x), y).item()
        print(f"step {state.steps}: over, loss {state.loss:.6f}", flush=True)
    if group is not None:
        group.close()


def save(state: elastic.State, session: elastic.Session, checkpoint: Path | None) -> None:
    """Write the checkpoint, on rank 0."""
    if checkpoint is not None and session.group.rank == 0:
        state.save(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--min", type=int, default=1, help="train only while there are so many ranks")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, and to save to")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    train(options)


if __name__ == "__main__":
    main()
