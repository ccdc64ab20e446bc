"""What the tests of this folder compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.testing import run_processes

from .gloo import gloo


def threads(group: shoal.ProcessGroup, meeting: str, one: bool) -> int:
    with gloo(group, meeting, 30.0, one_thread=one):
        world: Any = dist.group.WORLD
        number: int = world._get_backend(torch.device("cpu")).options._threads
        return number


@pytest.mark.parametrize("one", [True, False])
def test_gloo_has_one_thread_where_two_would_damage_the_heap(one: bool, tmp_path: Path) -> None:
    assert (run_processes(threads, 1, str(tmp_path / "ranks"), one) == [1]) == one
