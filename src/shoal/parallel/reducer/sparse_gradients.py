"""Averaging sparse gradients: every rank gets all ranks' rows and adds them up.

The rows differ from rank to rank, so there is nothing to reduce in place; what is sent is proportional to the
rows that were used and not to the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.torch_features import sparse_tensor
from ...future import Future
from ...group import ProcessGroup


class SparseReduction:
    """One sparse gradient on its way.

    Starts with the exchange of how many entries each rank has.

    Args:
        gradients: this rank's, to be added up: none if the parameter was not used here.
        like: the parameter.
        dtype: what to reduce in.
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
        own = torch.tensor([len(self._values)], device="cpu")  # on the host, which has to know the numbers
        counts = torch.empty(group.size, dtype=own.dtype, device="cpu")
        self._counts: Future[torch.Tensor] = group.all_gather_single(counts, own)

    def start(self) -> None:
        """Send the entries.  Collective; waits for the exchange of the numbers."""
        counts = self._counts.wait().tolist()
        indices, values = self._indices, self._values
        self._gathered = (
            self._group.all_gather(indices, [indices.new_empty(n, *indices.shape[1:]) for n in counts]),
            self._group.all_gather(values, [values.new_empty(n, *values.shape[1:]) for n in counts]),
        )

    def wait(self) -> torch.Tensor:
        """The average over all ranks, coalesced; the same on every rank."""
        indices, values = (torch.cat(future.wait(blocking=False)) for future in self._gathered)
        return sparse_tensor(indices.t(), values / self._group.size, self._like.shape).coalesce()
