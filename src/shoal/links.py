"""Connections among some ranks of a world: one backend, and how it was made.

The first ones of a world connect all its ranks.  A group with a backend or a transport of its own has others,
which its members make together; groups made from it use them too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .backend.base import Backend, GroupSpec
from .backend.registry import BackendFactory
from .common.wording import in_words, ranks_named
from .errors import RendezvousError, StoreError, StoreTimeout, WireError
from .rendezvous.membership import Membership
from .store import Store

#: where a member says why it cannot connect
_FAILED = "failed"


@dataclass(frozen=True, eq=False, slots=True)
class Links:
    """Connections.

    Attributes:
        backend: connects this process.
        ranks: those that are connected, by their ranks in the world.
        factory, options: how the backend was made.
    """

    backend: Backend
    ranks: tuple[int, ...]
    factory: BackendFactory | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def numbered(self, spec: GroupSpec) -> GroupSpec:
        """A group as the backend numbers its ranks, which in ``spec`` are those in the world."""
        place = {rank: index for index, rank in enumerate(self.ranks)}
        return replace(spec, ranks=tuple(place[rank] for rank in spec.ranks))

    def hosts(self, spec: GroupSpec) -> list[int]:
        """For each rank of a group the number of its host: equal ones for ranks that die with one machine."""
        return self.backend.hosts(self.numbered(spec).ranks)

    def lost(self) -> frozenset[int]:
        """The ranks of the world that are known to be lost."""
        return frozenset(self.ranks[rank] for rank in self.backend.lost())


def connect_some(
    membership: Membership,
    ranks: tuple[int, ...],
    factory: BackendFactory,
    *,
    timeout: float,
    options: Mapping[str, Any],
    store: Store,
    lost: Callable[[], frozenset[int]],
    look: Callable[[], None],
) -> Links:
    """Connect some ranks of a world to one another; each of them calls it.

    Args:
        membership: in the world.
        ranks: the members, by their ranks in the world.
        timeout: in seconds, until all are connected.
        store: of these members alone.
        lost: the ranks of the world that are lost already.
        look: called while others are waited for; raises if they never come.

    Raises:
        RendezvousError: a member was lost, or could not connect; RendezvousTimeout names those that are late.
    """

    def still_possible(positions: Collection[int] | None = None) -> None:
        awaited = ranks if positions is None else [ranks[position] for position in positions]
        try:
            reason = store.get(_FAILED, 0.0).decode()
        except StoreTimeout:
            pass
        else:
            raise RendezvousError(reason)
        if gone := lost().intersection(awaited):
            raise RendezvousError(f"{ranks_named(gone)} died while the members of a group were connecting")
        look()

    ours = replace(
        membership,
        rank=ranks.index(membership.rank),
        size=len(ranks),
        local_size=min(membership.local_size, len(ranks)),
        store=store,
        ranks=ranks,
        release=lambda seconds: None,
        abandon=lambda error: None,
        look=still_possible,
        connected=lambda: None,
    )
    try:
        backend = factory(ours, timeout=timeout, **options)
    except BaseException as error:
        try:
            said = f"rank {membership.rank} could not connect: {in_words(error)}"
            store.compare_set(_FAILED, b"", said.encode("utf-8", "backslashreplace"))
        except (StoreError, WireError):
            pass  # nobody can be told; they have their timeout
        raise
    return Links(backend, ranks, factory, dict(options))
