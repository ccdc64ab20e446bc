"""Tensor arguments of torch's group methods other than one dense tensor.

Torch passes one tensor, a list of one, or lists of lists.  Its group objects also accept several tensors per
rank (``group.allreduce([a, b])``), from the time when one process used several devices, and treat each tensor
like the tensor of a separate rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..common.formatting import counted
from ..common.torch_features import sparse_tensor
from ..errors import UnsupportedOperation, UsageError
from ..future import Future
from ..group import ProcessGroup
from ..spec import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, ReduceOp
from ..torch_terms.coalesced import all_gather_flat


def single_tensor(tensors: Any, what: str) -> torch.Tensor:
    """Return the only tensor of torch's list (which once had one tensor per device of the process)."""
    if isinstance(tensors, torch.Tensor):
        return waited_tensor(tensors)
    if len(tensors) != 1:
        raise UsageError(f"{what}: expected one tensor per rank, got {len(tensors)}")
    return waited_tensor(tensors[0])


def is_multi_tensor(tensors: Any) -> bool:
    """Return whether torch's list has several tensors of this rank."""
    return not isinstance(tensors, torch.Tensor) and len(tensors) > 1


def tensors_per_rank(tensors: Any, what: str) -> list[torch.Tensor]:
    """Return one tensor per rank, from torch's list of tensors or list of one such list."""
    if tensors and not isinstance(tensors[0], torch.Tensor):
        if len(tensors) != 1:
            raise UsageError(f"{what}: expected one list of tensors, got {len(tensors)}")
        tensors = tensors[0]
    return [waited_tensor(x) for x in tensors]


def waited_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or the tensor in the result of a functional collective, after waiting for it."""
    if x.__class__ is torch.Tensor:
        return x
    wait = getattr(x, "trigger_wait", None)
    return x if wait is None else wait()


def first_tensor(arguments: Iterable[Any]) -> torch.Tensor | None:
    """Return the first tensor in arguments that may be tensors, lists of them, and lists of lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, (list, tuple)) and (found := first_tensor(argument)) is not None:
            return found
    return None


def every_tensor(argument: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument that may be a tensor, a list of them, or a list of lists."""
    if isinstance(argument, torch.Tensor):
        return [waited_tensor(argument)]
    if isinstance(argument, (list, tuple)):
        return [x for part in argument for x in every_tensor(part)]
    return []


# -- several tensors per rank --------------------------------------------------------------------


_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def all_reduce_tensors(
    group: ProcessGroup, tensors: Sequence[torch.Tensor], op: ReduceOp, timeout: float
) -> Future[None]:
    """Reduce all tensors of all ranks into each of them; AVG divides by the number of ranks, as in Gloo."""
    _check_alike(group, "allreduce", tensors)
    with torch.no_grad():
        total = tensors[0].detach().clone()
        for x in tensors[1:]:
            total = _COMBINE.get(op, torch.add)(total, x.detach())
    if total.is_sparse:
        reduced = all_reduce_sparse(group, total, op, timeout)
    else:
        reduced = group.all_reduce(total, op, timeout=timeout)
    return reduced.then(lambda done: _copy(done.value(), tensors))


def broadcast_tensors(
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


def all_gather_tensors(
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

    return all_gather_flat(group, outputs[0], inputs, timeout).then(spread)


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


# -- sparse tensors ------------------------------------------------------------------------------
#
# Every rank gathers all entries and adds them up.  The entries differ between ranks, so nothing can be
# reduced in place.  The traffic is proportional to the number of entries, not to the shape.


def all_reduce_sparse(
    group: ProcessGroup, x: torch.Tensor, op: ReduceOp, timeout: float
) -> Future[torch.Tensor]:
    """Replace the sparse COO tensor ``x`` by the sum or average over all ranks.

    Returns:
        A future of ``x``, which is then coalesced.
    """
    if op not in (SUM, AVG):
        raise UnsupportedOperation(
            f"all_reduce on rank {group.rank}: {op!r} is not supported for sparse tensors; use SUM or AVG"
        )
    with torch.no_grad():
        mine = x.detach().coalesce()
        indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
    about = torch.tensor([len(values), int(op == AVG), mine.sparse_dim(), *mine.shape], device="cpu")
    table = torch.empty(group.size, len(about), dtype=about.dtype, device="cpu")

    def exchange(told: Future[torch.Tensor]) -> torch.Tensor:
        rows = told.value().tolist()
        for rank, row in enumerate(rows):
            if row[1:] != rows[0][1:]:
                raise UsageError(
                    f"all_reduce on rank {group.rank}: sparse tensors of different shapes or reductions: "
                    f"rank 0 has {_described(rows[0])}, and rank {rank} {_described(row)}"
                )
        with torch.no_grad(), torch.inference_mode(x.is_inference()):
            gathered = [
                group.all_gather(
                    [part.new_empty(row[0], *part.shape[1:]) for row in rows], part, timeout=timeout
                )
                for part in (indices, values)
            ]
            all_indices, all_values = (torch.cat(future.wait()) for future in gathered)
            total = sparse_tensor(all_indices.t(), all_values, x.shape).coalesce()
            x.copy_(total / group.size if op == AVG else total)
        return x

    return group.all_gather_single(table, about, timeout=timeout).then(exchange)


def _described(row: list[int]) -> str:
    """Return the text for a rank's description of its tensor."""
    _, average, sparse, *shape = row
    return f"{'AVG' if average else 'SUM'} of {shape}, {sparse} of its dimensions sparse"
