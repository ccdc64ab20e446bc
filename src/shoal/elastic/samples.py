"""Which samples a step takes, whatever the number of ranks.

A permutation of all samples, one for each pass over them, follows from the seed alone.  A step takes the next
ones; only a step that counts moves the position.  So every sample counts once a pass, whoever dies.
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
        rank: that takes it; in a hot spare, the one that it computes with.
        size: how many ranks take a share.
        indices: of this rank's samples, ``int64``.
        weight: for the mean loss over ``indices``; the mean of the weighted losses over all ranks is then the
            mean over the whole batch, however unevenly it is shared out.  0.0 in a hot spare.
        batch: how many samples the step takes on all ranks.
    """

    rank: int
    size: int
    indices: torch.Tensor
    weight: float
    batch: int


class Samples:
    """The order of the samples ``0`` to ``length - 1``, and how far training has come in it.

    Every step takes a full batch: the last one of a pass takes its other samples from the next pass.

    Args:
        length: how many samples there are.
        batch: how many a step takes, on all ranks together; at least one a rank.
        per_rank: how many a step takes on each rank, in the place of ``batch``: the batch then shrinks with
            the group, and ``session.on_resize`` is where a learning rate can follow.
        seed: of the permutations; the same on every rank.

    Attributes:
        passes: how many passes have been completed.
        offset: how many samples of the present pass have been used.

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
        """How many samples a step takes on ``size`` ranks.

        Raises:
            UsageError: more than there are, or fewer than one a rank.
        """
        count = self._batch if self._batch is not None else (self._per_rank or 0) * size
        if not size <= count <= self.length:
            raise UsageError(
                f"Samples: a batch of {count} of {self.length} samples cannot be shared out over {size} "
                "ranks: it must have one for each rank, and no more than there are"
            )
        return count

    def share(self, rank: int, size: int, *, active: int | None = None, after: int = 0) -> SampleShare:
        """What ``rank`` of ``size`` takes in the next step, or ``after`` steps later if the ranks stay.

        The ranks from ``active`` on are hot spares: they take what others take too, with a weight of 0.
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
        """A step that took ``batch`` samples counts."""
        ended, self.offset = divmod(self.offset + batch, self.length)
        self.passes += ended
        self._orders = {number: order for number, order in self._orders.items() if number >= self.passes}

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position.

        Raises:
            UsageError: it belongs to another number of samples, or to another seed.
        """
        for what, mine in (("length", self.length), ("seed", self.seed)):
            if state.get(what) != mine:
                raise UsageError(
                    f"Samples: the position is one with {what}={state.get(what)!r}, here it is {mine}: the "
                    "same samples would not come once each"
                )
        self.passes, self.offset = int(state["passes"]), int(state["offset"])
        self._orders.clear()

    def _order(self, number: int) -> torch.Tensor:
        """The permutation of the pass ``number``."""
        if number not in self._orders:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "pass", number))
            self._orders[number] = torch.randperm(self.length, generator=generator, device="cpu")
        return self._orders[number]


def seed_of(*parts: object) -> int:
    """A seed of 63 bits for a generator of random numbers, the same for the same parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
