"""All-reduce of sparse tensors: every rank gathers all entries and adds them up.

The entries differ between ranks, so nothing can be reduced in place.  The traffic is proportional to the
number of entries, not to the shape.
"""

from __future__ import annotations

import torch

from ..common.torch_features import sparse_tensor
from ..errors import UnsupportedOperation, UsageError
from ..future import Future
from ..group import ProcessGroup
from ..spec import AVG, SUM, ReduceOp


def all_reduce(group: ProcessGroup, x: torch.Tensor, op: ReduceOp, timeout: float) -> Future[torch.Tensor]:
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
                    part, [part.new_empty(row[0], *part.shape[1:]) for row in rows], timeout=timeout
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
