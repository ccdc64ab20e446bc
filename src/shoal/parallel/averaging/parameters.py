"""Averaging parameters over a group, in few messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...errors import UsageError
from ...future import Future
from ...group.group_argument import given_group
from ...spec import AVG
from ..coalesced import MESSAGE_BYTES, obstacle

#: Parameters, or the parameter groups of an optimiser.
Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def average_parameters(params: Parameters, group: object = None) -> None:
    """Replace each parameter by its mean over all ranks of ``group``.  Collective and blocking.

    Parameters of one dtype and device are sent together, in messages of at most 25 MiB; one message is packed
    while another is sent.  The means are those of ``ProcessGroup.all_reduce``, bitwise equal on all ranks.

    Args:
        params: the parameters of a model, or the parameter groups of an optimiser; the same on all ranks.
            Parameters that do not require a gradient are skipped.  Unlike in torch, parameters without a
            gradient are averaged, since these may differ between ranks with different data.

    Raises:
        UsageError: ``params`` contains other objects, or a tensor that cannot be sent.
        OutOfSharedMemory: a message does not fit into shared memory.
    """
    ranks = given_group(group, "average_parameters")
    on_the_way: list[tuple[list[torch.Tensor], list[torch.Tensor], Future[torch.Tensor]]] = []

    def unpack_one() -> None:
        tensors, views, future = on_the_way.pop(0)
        future.wait(blocking=False)
        torch._foreach_copy_(tensors, views)

    with torch.no_grad():
        for tensors in _messages(list(_trained(params))):
            count = sum(x.numel() for x in tensors)
            memory = ranks.empty(count, dtype=tensors[0].dtype, device=tensors[0].device)
            parts = memory.split_with_sizes([x.numel() for x in tensors])
            views = [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
            torch._foreach_copy_(views, tensors)
            on_the_way.append((tensors, views, ranks.all_reduce(memory, AVG)))
            if len(on_the_way) > 1:
                unpack_one()
        while on_the_way:
            unpack_one()


def _trained(params: Parameters) -> Iterator[torch.Tensor]:
    for item in params:
        some = item["params"] if isinstance(item, dict) else [item]
        for parameter in some:
            if not isinstance(parameter, torch.Tensor):
                raise UsageError(
                    "expected the parameters of a model or the parameter groups of an optimiser, got "
                    f"{type(parameter).__name__}"
                )
            if parameter.requires_grad:
                if (reason := obstacle(parameter)) is not None:
                    raise UsageError(
                        f"a parameter of shape {list(parameter.shape)} cannot be averaged: {reason}"
                    )
                yield parameter


def _messages(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters of each message, of one dtype and device, in the same order on all ranks."""
    portions: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if kind in portions and sizes[kind] + size > MESSAGE_BYTES:
            yield portions.pop(kind)
            sizes[kind] = 0
        portions.setdefault(kind, []).append(parameter)
        sizes[kind] = sizes.get(kind, 0) + size
    yield from portions.values()
