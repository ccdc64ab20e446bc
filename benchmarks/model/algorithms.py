"""All-reduce algorithms: what each rank sends when, and the closed formula for the time.

The formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), with latency and overhead kept apart: a rank that sends to p - 1 others pays
the latency once and the overhead p - 1 times.  ``shoal`` marks what ``cpp/collectives`` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from .parameters import Parameters


@dataclass(frozen=True)
class Round:
    """What a rank does before it may go on: send, in this order; receive; reduce so many bytes."""

    sends: list[tuple[int, float]] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)
    reduces: float = 0.0


def log2(ranks: int) -> int:
    """The logarithm of a power of two.  Raises ``ValueError`` for another number."""
    if ranks < 1 or ranks & (ranks - 1):
        raise ValueError(f"{ranks} ranks: this model knows powers of two alone")
    return ranks.bit_length() - 1


class Algorithm(ABC):
    """One way to all-reduce ``nbytes`` over ``ranks`` (hosts, with one rank each), powers of two."""

    name: ClassVar[str]

    @abstractmethod
    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        """The schedule of one rank."""

    @abstractmethod
    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        """Seconds until the last rank is done."""

    @abstractmethod
    def steps(self, ranks: int) -> int:
        """How often the last rank waits for another."""

    @abstractmethod
    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        """Messages and bytes that the busiest rank sends."""


class Everything(Algorithm):
    """Everything to everyone, reduced by each."""

    name = "everyone"

    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        others = [(rank + i) % ranks for i in range(1, ranks)]
        return [Round([(to, nbytes) for to in others], others, (ranks - 1) * nbytes)]

    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        if ranks == 1:
            return 0.0
        spent = (ranks - 1) * (machine.message(nbytes) + nbytes * machine.gamma)
        return machine.latency + spent

    def steps(self, ranks: int) -> int:
        return min(1, ranks - 1)

    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        return ranks - 1, (ranks - 1) * nbytes


class Direct(Algorithm):
    """Reduce-scatter by direct exchange, and the finished slices to everyone."""

    name = "direct"

    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        others = [(rank + i) % ranks for i in range(1, ranks)]
        slices = [(to, nbytes / ranks) for to in others]
        return [Round(slices, others, (ranks - 1) * nbytes / ranks), Round(slices, others)]

    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        if ranks == 1:
            return 0.0
        part = nbytes / ranks
        phase = machine.latency + (ranks - 1) * machine.message(part)
        return 2 * phase + (ranks - 1) * part * machine.gamma

    def steps(self, ranks: int) -> int:
        return min(2, 2 * (ranks - 1))

    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        return 2 * (ranks - 1), 2 * (ranks - 1) * nbytes / ranks


class Ring(Algorithm):
    """Slices travel round a ring twice (Patarasuk and Yuan, 2009)."""

    name = "ring"

    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        part, following, before = nbytes / ranks, (rank + 1) % ranks, (rank - 1) % ranks
        reducing = [Round([(following, part)], [before], part)] * (ranks - 1)
        return reducing + [Round([(following, part)], [before])] * (ranks - 1)

    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        part = nbytes / ranks
        hop = machine.latency + machine.message(part)
        return (ranks - 1) * (2 * hop + part * machine.gamma)

    def steps(self, ranks: int) -> int:
        return 2 * (ranks - 1)

    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        return 2 * (ranks - 1), 2 * (ranks - 1) * nbytes / ranks


class Doubling(Algorithm):
    """Recursive doubling: all of it, with the rank 1, 2, 4, ... further on."""

    name = "doubling"

    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        peers = [rank ^ (1 << k) for k in range(log2(ranks))]
        return [Round([(peer, nbytes)], [peer], nbytes) for peer in peers]

    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        return log2(ranks) * (machine.latency + machine.message(nbytes) + nbytes * machine.gamma)

    def steps(self, ranks: int) -> int:
        return log2(ranks)

    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        return log2(ranks), log2(ranks) * nbytes


class Halving(Algorithm):
    """Rabenseifner's: recursive halving to reduce-scatter, recursive doubling to gather."""

    name = "halving"

    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        peers = [(rank ^ (1 << k), nbytes / (ranks >> k)) for k in reversed(range(log2(ranks)))]
        down = [Round([(peer, part)], [peer], part) for peer, part in peers]
        return down + [Round([(peer, part)], [peer]) for peer, part in reversed(peers)]

    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        moved = nbytes * (ranks - 1) / ranks
        start = 2 * log2(ranks) * (machine.latency + machine.overhead)
        return start + moved * (2 * machine.gap + machine.gamma)

    def steps(self, ranks: int) -> int:
        return 2 * log2(ranks)

    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        return 2 * log2(ranks), 2 * nbytes * (ranks - 1) / ranks


class Tree(Algorithm):
    """Reduce to rank 0 and broadcast from it, along a binomial tree."""

    name = "tree"

    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        depth = log2(ranks)
        height = depth if rank == 0 else (rank & -rank).bit_length() - 1  # of the subtree below
        up = [Round([], [rank + (1 << k)], nbytes) for k in range(height)]
        down = [Round([(rank + (1 << k), nbytes) for k in reversed(range(height))])]
        if rank == 0:
            return up + down
        parent = rank - (1 << height)
        return [*up, Round([(parent, nbytes)], [parent]), *down]

    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        hop = machine.latency + machine.message(nbytes)
        return log2(ranks) * (2 * hop + nbytes * machine.gamma)

    def steps(self, ranks: int) -> int:
        return 2 * log2(ranks)

    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        return log2(ranks), log2(ranks) * nbytes


@dataclass(frozen=True)
class Hierarchical(Algorithm):
    """``locals_`` ranks a host: partial sums in shared memory, then ``Direct`` between the owners of a slice.

    Every owner moves 1/k of the bytes, and the k owners of a host share its port.  What shared memory
    costs is left out: it is the same for every number of hosts.
    """

    locals_: int
    name: ClassVar[str] = "hierarchical"

    def _slice(self, nbytes: float) -> float:
        return nbytes / self.locals_

    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        """Of the owner of one slice on host ``rank``; all slices take the same time."""
        return Direct().rounds(rank, ranks, self._slice(nbytes))

    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        return Direct().time(ranks, self._slice(nbytes), machine.shared_by(self.locals_))

    def steps(self, ranks: int) -> int:
        return Direct().steps(ranks)

    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        """By all owners of a host."""
        messages, moved = Direct().sent(ranks, nbytes)
        return messages * self.locals_, moved


#: between hosts of one rank
ALGORITHMS: tuple[Algorithm, ...] = (Everything(), Direct(), Ring(), Doubling(), Halving(), Tree())

#: up to here shoal's all-reduce over links sends everything to everyone (``kSmall`` of over_links.cc)
SMALL = 32 * 1024


def shoal(nbytes: float, ranks: int) -> Algorithm:
    """What ``cpp/collectives/over_links.cc`` does with a tensor of ``nbytes`` on hosts of one rank."""
    return Everything() if nbytes <= SMALL or nbytes < 64 * ranks else Direct()


def best(ranks: int, nbytes: float, machine: Parameters) -> Algorithm:
    """The fastest of :data:`ALGORITHMS` by the formulas."""
    return min(ALGORITHMS, key=lambda algorithm: algorithm.time(ranks, nbytes, machine))
