"""All-reduce algorithms: the schedule of each rank, and a closed formula for the time.

The formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations
in MPICH" (2005), with latency and overhead separated: a rank that sends to p - 1 others pays the latency once
and the overhead p - 1 times. ``shoal`` is the algorithm that ``cpp/collectives/members.cc`` selects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from shoal import _core
from shoal.spec import OpKind

from .parameters import Parameters


@dataclass(frozen=True)
class Round:
    """One step of a rank: send, in this order; receive; reduce this many bytes."""

    sends: list[tuple[int, float]] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)
    reduces: float = 0.0


def log2(ranks: int) -> int:
    """Return the logarithm of a power of two; raise ``ValueError`` for other numbers."""
    if ranks < 1 or ranks & (ranks - 1):
        raise ValueError(f"{ranks} ranks: this model supports powers of two only")
    return ranks.bit_length() - 1


class Algorithm(ABC):
    """An all-reduce of ``nbytes`` over ``ranks`` hosts with one rank each; powers of two."""

    name: ClassVar[str]

    @abstractmethod
    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        """Return the schedule of one rank."""

    @abstractmethod
    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        """Return the seconds until the last rank has finished."""

    @abstractmethod
    def steps(self, ranks: int) -> int:
        """Return how many times the last rank waits for another."""

    @abstractmethod
    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        """Return the messages and bytes that the busiest rank sends."""


class Everything(Algorithm):
    """Each rank sends everything to all others and reduces."""

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
    """Reduce-scatter by direct exchange, then each rank sends its slice to all others."""

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
    """Slices travel around a ring twice (Patarasuk and Yuan, 2009)."""

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
    """Recursive doubling: full exchanges with the ranks at distance 1, 2, 4, ..."""

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
    """Recursive halving to reduce-scatter, and doubling to gather (Rabenseifner).

    shoal has the variant for any number of members (Träff 2023), which takes as long for powers of two.
    """

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
        height = depth if rank == 0 else (rank & -rank).bit_length() - 1  # of the rank's subtree
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
    """``locals_`` ranks per host: partial sums in shared memory, then ``Direct`` between owners of a slice.

    Each owner moves 1/k of the bytes, and the k owners of a host share its port. The cost of shared memory is
    left out, because it does not depend on the number of hosts.
    """

    locals_: int
    name: ClassVar[str] = "hierarchical"

    def _slice(self, nbytes: float) -> float:
        return nbytes / self.locals_

    def rounds(self, rank: int, ranks: int, nbytes: float) -> list[Round]:
        """Return the schedule of the owner of one slice on host ``rank``; all slices take the same time."""
        return Direct().rounds(rank, ranks, self._slice(nbytes))

    def time(self, ranks: int, nbytes: float, machine: Parameters) -> float:
        return Direct().time(ranks, self._slice(nbytes), machine.shared_by(self.locals_))

    def steps(self, ranks: int) -> int:
        return Direct().steps(ranks)

    def sent(self, ranks: int, nbytes: float) -> tuple[int, float]:
        """Return the sum over all owners of a host."""
        messages, moved = Direct().sent(ranks, nbytes)
        return messages * self.locals_, moved


#: algorithms between hosts with one rank
ALGORITHMS: tuple[Algorithm, ...] = (Everything(), Direct(), Ring(), Doubling(), Halving(), Tree())


#: those of shoal, by the name of the choice
CHOICES: dict[str, Algorithm] = {each.name: each for each in (Direct(), Doubling(), Halving(), Ring())}


def chosen(choice: str, nbytes: int, ranks: int) -> Algorithm:
    """The algorithm that ``algorithm=choice`` is for ``nbytes``; a few bytes are sent to all at once."""
    at_once = choice == "direct" and nbytes <= _core.at_once_limit(ranks)
    return Everything() if at_once else CHOICES[choice]


def shoal(nbytes: int, ranks: int) -> Algorithm:
    """The algorithm that ``algorithm="auto"`` is for ``nbytes`` of float32 on hosts with one rank."""
    choice = _core.algorithm_for(OpKind.ALL_REDUCE, ranks, nbytes, nbytes, True)
    return chosen(choice, nbytes, ranks)


def best(ranks: int, nbytes: float, machine: Parameters) -> Algorithm:
    """The fastest of :data:`ALGORITHMS` according to the formulas."""
    return min(ALGORITHMS, key=lambda algorithm: algorithm.time(ranks, nbytes, machine))
