"""The programs of `chaos.py`."""

from __future__ import annotations

import hashlib
import math
import random
import time

import torch
from torch import nn

import shoal
from shoal import elastic
from shoal.testing import chaos

#: number of operations or steps after the last fault
AFTER = 50
LENGTH, BATCH = 500, 40


def collectives(group: shoal.ProcessGroup, resident: int = 0) -> tuple[int, int]:
    """All-reduce, check and rebuild; return epoch and size of the last group, equal on all survivors."""
    held = torch.ones(resident * 2**18)
    chaos.ready(group)
    left = group.size - len(chaos.planned())
    done, end = 0, None
    sizes = (1, 1_000, 50_000, 400_000)
    while done != end:
        memory = {n: group.empty(n) for n in sizes}
        if group.size == left and end is None:
            end = done + AFTER
        try:
            while done != end:
                n = random.Random(done).choice(sizes)  # the same on all ranks
                x = memory[n].fill_(group.rank + 1.0) if done % 2 else torch.full((n,), group.rank + 1.0)
                group.all_reduce(x).wait()
                chaos.mark(group)
                right = group.size * (group.size + 1) / 2
                if not bool((x == right).all()):
                    raise AssertionError(f"operation {done} gave a wrong result")
                done += 1
        except shoal.PeerLost:
            group = rebuilt(group, done)
            assert group.rebuilt is not None
            done = min(int(note) for note in group.rebuilt.notes.values())  # of the slowest rank
    group = rebuilt(group, done)
    group.close()
    del held
    return group.epoch, group.size


def rebuilt(group: shoal.ProcessGroup, done: int) -> shoal.ProcessGroup:
    """Rebuild the group, with a note of this rank's progress."""
    new = group.rebuild(note=str(done).encode())
    assert new is not None
    return new


def training(
    group: shoal.ProcessGroup | None,
    steps: int | None = None,
    pace: float = 0.0,
    longest: float = math.inf,
) -> str:
    """Train a small model in a session.

    Each rank compares its samples of each step with those of training without faults.

    Args:
        steps: number of steps; None means until some steps after the last fault, without joins or leaves.
        pace: minimum seconds per step.
        longest: maximum seconds between two commits; no rank may wait for a store longer.

    Returns:
        A digest of the parameters, the optimizer and the size of the group after every step.
    """
    torch.manual_seed(0 if group is not None else 1)  # newcomers start with other parameters
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 16, generator=generator)
    y = x.sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    samples = elastic.Samples(LENGTH, batch=BATCH, seed=1)
    state = elastic.State(model=net, optimizer=optimizer, samples=samples, history="")
    undisturbed, harms, number = elastic.Samples(LENGTH, batch=BATCH, seed=1), len(chaos.planned()), -1
    with elastic.Session(state, group=group) as session:
        model = session.parallel(net)
        if group is not None:
            chaos.ready(group)
        committed = math.inf
        for step in session.steps(until=steps):
            if number < 0:
                undisturbed.advance(BATCH * step.number)
            elif step.number != number:
                raise AssertionError(f"got step {step.number} instead of {number}")
            number = step.number
            events = session.events
            if steps is None and sum(len(each.lost) for each in events) == harms and (
                number >= events[-1].step + AFTER
            ):  # fmt: skip
                break
            with step:
                me, size = session.group.rank, session.group.size
                if not torch.equal(step.indices, undisturbed.share(me, size).indices):
                    raise AssertionError(f"rank {me} of {size} takes wrong samples in step {number}")
                loss = nn.functional.mse_loss(model(x[step.indices]), y[step.indices])
                (loss * step.weight).backward()
                chaos.mark(session.group)
                step.commit()
                since, committed = committed, time.monotonic()
                if committed - since > longest:
                    raise AssertionError(f"step {number} came {committed - since:.1f} s after the one before")
                optimizer.step()
                optimizer.zero_grad()
                undisturbed.advance(BATCH)
                number += 1
                said = f"{state.history} {state.digest().hex()} {size}"
                state.history = hashlib.sha256(said.encode()).hexdigest()
            time.sleep(pace)
    if not bool(torch.isfinite(net[0].weight).all()):
        raise AssertionError("training diverged")
    return state.history
