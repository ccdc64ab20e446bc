"""The exchange of bytes among all ranks of a native backend, before its first group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...future import derive_key
from ...rendezvous.membership import Membership
from ...spec import Operation, OpKind
from ..base import GroupSpec
from ..identity import group_ident
from .channel import NativeBackend


def all_gather_bytes(
    native: NativeBackend, membership: Membership, mine: bytes, timeout: float
) -> list[bytes]:
    """Return the ``mine`` of all ranks, in the order of the ranks, within ``timeout`` seconds."""
    ident = derive_key(b"engine", group_ident(f"{membership.job}/{membership.epoch}"))
    channel = native.channel(
        GroupSpec(
            name="engine",
            ident=ident,
            rank=membership.rank,
            ranks=tuple(range(membership.size)),
            internal=True,
        )
    )

    def all_gather(number: int, x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts = [torch.empty(size, dtype=x.dtype, device="cpu") for size in sizes]
        operation = Operation(OpKind.ALL_GATHER, number, 0, [x], parts, timeout, sizes=sizes)
        gathered: list[torch.Tensor] = channel.submit(operation).wait()
        return gathered

    try:
        length = torch.tensor([len(mine)], device="cpu")
        sizes = [int(size) for size in all_gather(0, length, [1] * membership.size)]
        raw = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")
        return [bytes(part.tolist()) for part in all_gather(1, raw, sizes)]
    finally:
        channel.close(timeout)
