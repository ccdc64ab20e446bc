"""Tensors are let go of as soon as an operation is complete, however that was found out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.testing import run_threads
from tests.support.waiting import until

USES: dict[str, Callable[[shoal.ProcessGroup, torch.Tensor], shoal.Future[Any]]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "strided": lambda group, x: group.all_reduce(x[::2]),
    "into a list": lambda group, x: group.all_gather([torch.zeros_like(x) for _ in range(group.size)], x),
}


@pytest.mark.parametrize("use", USES)
def test_an_operation_that_was_only_asked_whether_it_is_done_keeps_nothing(use: str) -> None:
    asked = threading.Event()

    def rank(group: shoal.ProcessGroup) -> None:
        if group.rank == 0:
            asked.wait(30)
        x = torch.ones(1000)
        gone = weakref.ref(x)
        future = USES[use](group, x)
        if group.rank == 1:
            assert not future.done()  # rank 0 is not there yet
            asked.set()
        until(future.done)
        del x, future
        assert gone() is None  # before this rank begins another operation

    run_threads(rank, 2)
