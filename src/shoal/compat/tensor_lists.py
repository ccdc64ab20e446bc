"""Operations on several tensors per rank, from the time when one process used several devices.

Torch's group objects still accept them (``group.allreduce([a, b])``) and treat each tensor like the tensor of
a separate rank.  The functions of ``torch.distributed`` pass one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..common.wording import counted
from ..errors import UsageError
from ..future import Future
from ..group import ProcessGroup
from ..spec import BAND, BOR, BXOR, MAX, MIN, PRODUCT, ReduceOp
from ..torch_terms.coalesced import interleaved
from . import sparse_all_reduce

_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def all_reduce(
    group: ProcessGroup, tensors: Sequence[torch.Tensor], op: ReduceOp, timeout: float
) -> Future[None]:
    """Reduce all tensors of all ranks into each of them; AVG divides by the number of ranks, as in Gloo."""
    _check_alike(group, "allreduce", tensors)
    with torch.no_grad():
        total = tensors[0].detach().clone()
        for x in tensors[1:]:
            total = _COMBINE.get(op, torch.add)(total, x.detach())
    if total.is_sparse:
        reduced = sparse_all_reduce.all_reduce(group, total, op, timeout)
    else:
        reduced = group.all_reduce(total, op, timeout=timeout)
    return reduced.then(lambda done: _copy(done.value(), tensors))


def broadcast(
    group: ProcessGroup, tensors: Sequence[torch.Tensor], root: int, which: int, timeout: float
) -> Future[None]:
    """Copy tensor ``which`` of rank ``root`` into all tensors of all ranks."""
    _check_alike(group, "broadcast", tensors)
    if not 0 <= which < len(tensors):
        raise UsageError(
            f"broadcast on rank {group.rank}: rootTensor is {which}, expected 0 to {len(tensors) - 1}"
        )
    return group.broadcast(tensors[which], root, timeout=timeout).then(
        lambda done: _copy(done.value(), tensors)
    )


def all_gather(
    group: ProcessGroup,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    timeout: float,
) -> Future[None]:
    """Gather all tensors of all ranks, ordered by rank, into each of the lists ``outputs``."""
    count = len(inputs)
    if len(outputs) != count or any(len(out) != count * group.size for out in outputs):
        raise UsageError(
            f"allgather on rank {group.rank}: expected {counted(count, 'list')} of "
            f"{counted(count * group.size, 'tensor')} for "
            f"{count} inputs, got lists of {[len(out) for out in outputs]}"
        )

    def spread(done: Future[Any]) -> None:
        done.value()
        for place, x in enumerate(outputs[0]):
            _copy(x, [out[place] for out in outputs[1:]])

    return interleaved(group, outputs[0], inputs, timeout).then(spread)


def _check_alike(group: ProcessGroup, what: str, tensors: Sequence[torch.Tensor]) -> None:
    kinds = {(x.dtype, x.layout, x.shape) for x in tensors}
    if len(kinds) != 1:
        raise UsageError(
            f"{what} on rank {group.rank}: expected tensors of one dtype, layout and shape, got "
            + ", ".join(f"{x.dtype} {x.layout} {list(x.shape)}" for x in tensors)
        )


def _copy(x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    # This runs in a callback, where the caller's modes are not active.
    for other in tensors:
        if other is not x:
            with torch.no_grad(), torch.inference_mode(other.is_inference()):
                other.copy_(x)
