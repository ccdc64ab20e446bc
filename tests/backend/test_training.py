"""Data-parallel training has the same bits on every backend for the CPU; ``test_mpi.py`` has MPI."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import run_threads
from tests.parallel.models import Normed, batches, experts, fixed, loss_of, part
from tests.parallel.training import sgd, wrapped

STEPS = 5
BACKENDS: dict[str, dict[str, Any]] = {
    "shared memory": {"transport": "shm"},
    "tcp": {"transport": "tcp"},
    "two hosts": {"hosts": ["left", "right"]},
    "mailbox": {"backend": "mailbox"},
    "relay": {"backend": "relay"},
}


def trained(group: shoal.ProcessGroup) -> list[torch.Tensor]:
    """Train a model with buffers, and one whose ranks use different parts; both in float32, two ranks."""
    normed, chosen = fixed(Normed()), experts(dtype=torch.float32)
    models: list[tuple[nn.Module, tuple[Any, ...]]] = [
        (wrapped(group, normed), ()),
        (wrapped(group, chosen, find_unused_parameters=True), ([group.rank, 2],)),
    ]
    for model, more in models:
        optimizer = sgd(model)
        for batch in batches(STEPS, dtype=torch.float32):
            optimizer.zero_grad()
            loss_of(model, part(batch, group), *more).backward()
            optimizer.step()
    return [x.detach().clone() for net in (normed, chosen) for x in (*net.parameters(), *net.buffers())]


@functools.cache
def expected() -> list[list[torch.Tensor]]:
    return run_threads(trained, 2)


def check(results: list[list[torch.Tensor]]) -> None:
    for rank, (found, wanted) in enumerate(zip(results, expected(), strict=True)):
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(a, b), f"rank {rank}, tensor {index}:\n{a}\nand with the native backend\n{b}"


@pytest.mark.parametrize("name", BACKENDS)
def test_training_gives_the_same_bits_on_every_backend(name: str) -> None:
    check(run_threads(trained, 2, **BACKENDS[name]))
