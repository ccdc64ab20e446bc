"""Averaging sparse gradients: every rank receives the rows of all ranks and sums them.

The rows differ between ranks, so they cannot be reduced in place.  The bytes sent are proportional to the
number of used rows and not to the size of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.torch_features import sparse_tensor
from ...future import Future
from ...group import ProcessGroup


class SparseReduction:
    """The reduction of one sparse gradient.  The constructor starts the exchange of the numbers of entries.

    Args:
        gradients: the gradients of this rank, to be summed; empty if the parameter was not used here.
        like: the parameter.
        dtype: the dtype to reduce in.
    """

    def __init__(
        self,
        group: ProcessGroup,
        gradients: Sequence[torch.Tensor],
        like: torch.Tensor,
        sparse_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._group = group
        self._like = like
        if gradients:
            total = sparse_tensor(
                torch.cat([gradient._indices().to(like.device) for gradient in gradients], 1),
                torch.cat([gradient._values().to(like.device, dtype) for gradient in gradients]).detach(),
                like.shape,
            ).coalesce()
            self._indices = total.indices().t().contiguous()
            self._values = total.values()
        else:
            self._indices = torch.empty(0, sparse_dim, dtype=torch.int64, device=like.device)
            self._values = torch.empty(0, *like.shape[sparse_dim:], dtype=dtype, device=like.device)
        own = torch.tensor([len(self._values)], device="cpu")  # on the host, which needs the numbers
        counts = torch.empty(group.size, dtype=own.dtype, device="cpu")
        self._counts: Future[torch.Tensor] = group.all_gather_single(counts, own)

    def start(self) -> None:
        """Wait for the numbers of entries and start sending the entries.  Collective."""
        counts = self._counts.wait().tolist()
        indices, values = self._indices, self._values
        self._gathered = (
            self._group.all_gather([indices.new_empty(n, *indices.shape[1:]) for n in counts], indices),
            self._group.all_gather([values.new_empty(n, *values.shape[1:]) for n in counts], values),
        )

    def wait(self) -> torch.Tensor:
        """Return the average over all ranks, coalesced; equal on every rank."""
        indices, values = (torch.cat(future.wait(blocking=False)) for future in self._gathered)
        return sparse_tensor(indices.t(), values / self._group.size, self._like.shape).coalesce()
