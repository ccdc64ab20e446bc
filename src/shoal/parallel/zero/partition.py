"""The assignment of parameters to ranks, with about equal bytes for each, and equal results on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from ...group import ProcessGroup

#: A rank is preferred for its host while its load is at most this multiple of the mean.
_HOST_LOAD_LIMIT = 4 / 3


class Partition:
    """The owners of each parameter.

    Parameters are assigned by descending size, each to the rank with the least load: the maximum load is at
    most 4/3 of the optimum (Graham, "Bounds on multiprocessing timing anomalies", 1969).  Parameters are not
    split, because optimisers may need one as a whole.  Frozen ones (no state) are counted separately.

    With several copies a parameter has as many owners, on different hosts unless that overloads a rank.  One
    of the owners is the sender, chosen such that all ranks send about equal bytes.

    Args:
        size: number of ranks.
        copies: number of owners of a parameter; in a smaller group every rank owns all.
        hosts: the host number of each rank; None: all ranks are on one host.
    """

    def __init__(self, size: int, copies: int = 1, hosts: Sequence[int] | None = None) -> None:
        self._size = size
        self._copies = min(copies, size)
        self._hosts = list(hosts) if hosts is not None else [0] * size
        self._owners: dict[torch.Tensor, tuple[int, ...]] = {}
        self._loads = {trained: [0] * size for trained in (True, False)}
        self._sends = {trained: [0] * size for trained in (True, False)}

    def add(
        self,
        parameters: Sequence[torch.Tensor],
        held: Sequence[Collection[int]] | None = None,
        trained: Sequence[bool] | None = None,
    ) -> None:
        """Assign more parameters; previous ones keep their owners.

        Args:
            held: for each parameter the ranks that have its state, at least one; these are preferred as
                owners.  None: there is no state yet.
            trained: whether each parameter is not frozen; None: as on this rank.
        """
        kinds = [parameter.requires_grad for parameter in parameters] if trained is None else trained
        everyone = range(self._size)
        has = [everyone] * len(parameters) if held is None else held
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
        owners: list[list[int]] = [[] for _ in parameters]
        limits = self._limits(kinds, sizes)

        def assign(index: int, candidates: Iterable[int]) -> None:
            loads, mine = self._loads[kinds[index]], owners[index]
            if len(mine) == self._copies:
                return
            left = [rank for rank in candidates if rank not in mine]
            while left and len(mine) < self._copies:
                rank = self._next_owner(left, mine, loads, sizes[index], limits[kinds[index]])
                mine.append(rank)
                left.remove(rank)
                loads[rank] += sizes[index]

        if held is not None:
            for index in sorted(order, key=lambda index: len(held[index]) > self._copies):
                assign(index, sorted(held[index]))
        for index in order:
            assign(index, everyone)
        if held is not None:
            idle = set(everyone).difference(*held)
            for index in order:
                self._move_copy_to_idle(
                    owners[index], held[index], idle, self._loads[kinds[index]], sizes[index]
                )
        for index in order:
            sends = self._sends[kinds[index]]
            able = [rank for rank in owners[index] if rank in has[index]]
            sender = min(able, key=lambda rank: (sends[rank], able.index(rank)))
            sends[sender] += sizes[index]
            others = sorted(rank for rank in owners[index] if rank != sender)
            self._owners[parameters[index]] = (sender, *others)

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Return the rank that sends ``parameter`` when it is updated, or None if it was never added."""
        owners = self._owners.get(parameter)
        return None if owners is None else owners[0]

    def owners(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the ranks that update ``parameter``, the sender first; empty if it was never added."""
        return self._owners.get(parameter, ())

    def _limits(self, kinds: Sequence[bool], sizes: Sequence[int]) -> dict[bool, float]:
        """Return the maximum loads for which a rank is preferred for its host."""
        limits = {}
        for trained, loads in self._loads.items():
            added = sum(size for kind, size in zip(kinds, sizes, strict=True) if kind is trained)
            limits[trained] = _HOST_LOAD_LIMIT * (sum(loads) + self._copies * added) / self._size
        return limits

    def _next_owner(
        self, candidates: Sequence[int], others: Sequence[int], loads: Sequence[int], size: int, limit: float
    ) -> int:
        """Return the next owner of a parameter that already has the owners ``others``."""
        hosts = {self._hosts[rank] for rank in others}
        elsewhere = [
            rank
            for rank in candidates
            if self._hosts[rank] not in hosts and (loads[rank] == 0 or loads[rank] + size <= limit)
        ]
        return min(elsewhere or candidates, key=lambda rank: (loads[rank], rank))

    @staticmethod
    def _move_copy_to_idle(
        owners: list[int], held: Collection[int], idle: Collection[int], loads: list[int], size: int
    ) -> None:
        """Move a copy from the most loaded owner to an ``idle`` rank (without state) if another owner keeps
        one.
        """
        takers = [rank for rank in idle if rank not in owners]
        keeps = [rank for rank in owners if rank in held]
        if not takers or len(keeps) < 2:
            return
        taker = min(takers, key=lambda rank: (loads[rank], rank))
        giver = max(keeps, key=lambda rank: (loads[rank], -rank))
        if loads[taker] + size < loads[giver]:
            owners[owners.index(giver)] = taker
            loads[giver] -= size
            loads[taker] += size


def partition_of(group: ProcessGroup, copies: int) -> Partition:
    """Return an empty partition over the ranks of a group."""
    return Partition(group.size, copies, group._links.hosts(group._spec) if copies > 1 else None)
