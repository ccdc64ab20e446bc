"""The distribution of samples over steps and ranks, independent of the number of ranks.

Each pass (epoch of the data set) has a permutation of all samples, computed from the seed.  A step takes the
next samples of it, and only a completed step advances the position.  So every sample is used exactly once in
each pass, even if ranks fail.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UsageError

_STATE = ("length", "seed", "passes", "offset")


@dataclass(frozen=True, slots=True)
class SampleShare:
    """The samples of one rank in one step.

    Attributes:
        rank: the rank that takes the share; on a hot spare, the rank whose share it duplicates.
        size: number of ranks that take a share.
        indices: indices of the samples, ``int64``.
        weight: factor for the mean loss over ``indices``, so that the average over all ranks is the mean over
            the whole batch even if shares differ in size.  0.0 on a hot spare.
        batch: number of samples that the step takes on all ranks together.
    """

    rank: int
    size: int
    indices: torch.Tensor
    weight: float
    batch: int


class Samples:
    """The order of the samples ``0`` to ``length - 1``, and the position of training in it.

    Every step takes a full batch: the last one of a pass is filled with samples of the next pass.

    Args:
        length: number of samples.
        batch: number of samples per step on all ranks together; at least one per rank.
        per_rank: number of samples per step on each rank, instead of ``batch``.  The batch then changes with
            the group; use ``session.on_resize`` to adapt the learning rate.
        seed: seed of the permutations; the same on every rank.

    Attributes:
        passes: number of completed passes.
        offset: number of samples used in the current pass.

    Raises:
        UsageError: not exactly one of ``batch`` and ``per_rank`` is given, or a number is out of range.
    """

    def __init__(
        self, length: int, *, batch: int | None = None, per_rank: int | None = None, seed: int = 0
    ) -> None:
        if (batch is None) == (per_rank is None):
            raise UsageError("Samples takes either batch= (of all ranks together) or per_rank=")
        for what, value in (("length", length), ("batch", batch), ("per_rank", per_rank)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"Samples: {what}={value!r}: expected a positive integer")
        if not isinstance(seed, int):
            raise UsageError(f"Samples: seed={seed!r}: expected an integer")
        self.length = length
        self.seed = seed
        self.passes = 0
        self.offset = 0
        self._batch = batch
        self._per_rank = per_rank
        self._orders: dict[int, torch.Tensor] = {}
        self.batch(1)

    def batch(self, size: int) -> int:
        """Return the number of samples that a step takes on ``size`` ranks.

        Raises:
            UsageError: it exceeds ``length``, or is less than one sample per rank.
        """
        count = self._batch if self._batch is not None else (self._per_rank or 0) * size
        if not size <= count <= self.length:
            raise UsageError(
                f"Samples: a batch of {count} of {self.length} samples cannot be shared out over {size} "
                "ranks: it must have at least one sample per rank, and at most all samples"
            )
        return count

    def share(self, rank: int, size: int, *, active: int | None = None, after: int = 0) -> SampleShare:
        """Return the share of ``rank`` in the next step, or ``after`` steps later in the same group.

        The ranks from ``active`` on are hot spares: they duplicate shares of other ranks with a weight of 0.
        """
        taking = size if active is None else min(active, size)
        batch = self.batch(taking)
        part = rank % taking
        first, last = part * batch // taking, (part + 1) * batch // taking
        passes, at = divmod(self.offset + after * batch + first, self.length)
        indices = self._order(self.passes + passes)[at : at + last - first]
        beyond = (last - first) - indices.numel()
        if beyond > 0:
            indices = torch.cat([indices, self._order(self.passes + passes + 1)[:beyond]])
        weight = (last - first) * size / batch if rank == part else 0.0
        return SampleShare(part, taking, indices, weight, batch)

    def advance(self, batch: int) -> None:
        """Move the position by one completed step of ``batch`` samples."""
        ended, self.offset = divmod(self.offset + batch, self.length)
        self.passes += ended
        self._orders = {number: order for number, order in self._orders.items() if number >= self.passes}

    def state_dict(self) -> dict[str, int]:
        """Return the position, for a checkpoint."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position.

        Raises:
            UsageError: the position was saved with another number of samples, or with another seed.
        """
        for what, mine in (("length", self.length), ("seed", self.seed)):
            if state.get(what) != mine:
                raise UsageError(
                    f"Samples: the position was saved with {what}={state.get(what)!r}, here it is {mine}: "
                    "samples would be repeated or left out"
                )
        self.passes, self.offset = int(state["passes"]), int(state["offset"])
        self._orders.clear()

    def _order(self, number: int) -> torch.Tensor:
        """Return the permutation of pass ``number``."""
        if number not in self._orders:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "pass", number))
            self._orders[number] = torch.randperm(self.length, generator=generator, device="cpu")
        return self._orders[number]


def seed_of(*parts: object) -> int:
    """Return a seed of 63 bits for a random generator, determined by ``parts``."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
