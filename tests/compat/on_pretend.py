"""A program: tensors of the pretend device are refused by groups for the CPU, torch's and shoal's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shoal
from tests.support import pretend_device, releases

CALLS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "all_reduce": lambda x, size: dist.all_reduce(x),
    "broadcast": lambda x, size: dist.broadcast(x, 0),
    "reduce": lambda x, size: dist.reduce(x, 0),
    "all_gather": lambda x, size: dist.all_gather([torch.empty_like(x) for _ in range(size)], x),
    "all_gather_single": lambda x, size: releases.all_gather_single(x.repeat(size), x),
    "reduce_scatter_single": lambda x, size: releases.reduce_scatter_single(x, x.repeat(size)),
    "all_to_all_single": lambda x, size: dist.all_to_all_single(torch.empty_like(x), x),
    "send": lambda x, size: dist.send(x, 1 - dist.get_rank()),
    "recv": lambda x, size: dist.recv(x, 1 - dist.get_rank()),
}


def main() -> None:
    pretend_device.make()
    x = torch.ones(4).to(pretend_device.DEVICE)
    refusal = r"pretend:0, but the group takes tensors on cpu.*backend for pretend.*cpu:shoal,pretend:"
    with shoal.init() as group:
        for refused in (group.all_reduce, group.all_gather, partial(group.send, dst=1 - group.rank)):
            with pytest.raises(shoal.UsageError, match=refusal):
                refused(x)
        assert group.all_reduce(torch.ones(1)).wait().item() == group.size
    dist.init_process_group("shoal")
    size = dist.get_world_size()
    for name, call in CALLS.items():
        before = dist.group.WORLD._get_sequence_number_for_group()
        with pytest.raises(shoal.UsageError, match=refusal):
            call(x, size)
        assert dist.group.WORLD._get_sequence_number_for_group() == before, f"{name} has sent something"
        y = torch.ones(1)
        dist.all_reduce(y)
        assert y.item() == size, name
    dist.destroy_process_group()
    print("refused")


if __name__ == "__main__":
    main()
