"""Ranks as threads."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal import ProcessGroup, RemoteError
from shoal.testing import run_threads


def test_results_come_in_rank_order(store_backend: str) -> None:
    def add(group: ProcessGroup, amount: int) -> tuple[int, float]:
        x = torch.full((3,), float(group.rank + amount))
        return group.rank, group.all_reduce(x).wait().sum().item()

    assert run_threads(add, 3, 1, backend=store_backend) == [(0, 18.0), (1, 18.0), (2, 18.0)]
