"""The connections among some ranks of a world: one backend, and its factory.

The first links of a world connect all its ranks.  The members of a group with another backend or transport
create further links together, which groups derived from it use too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .backend.base import Backend, GroupSpec
from .backend.registry import BackendFactory
from .common.formatting import describe_error, ranks_named
from .errors import RendezvousError, StoreError, StoreTimeout, WireError
from .rendezvous.membership import Membership
from .store import Store

#: key for the reason why a member cannot connect
_FAILED = "failed"


@dataclass(frozen=True, eq=False, slots=True)
class Links:
    """The connections of this process to some ranks.

    Attributes:
        ranks: the connected ranks, numbered in the world.
        factory, options: factory of the backend, and its options.
    """

    backend: Backend
    ranks: tuple[int, ...]
    factory: BackendFactory
    options: Mapping[str, Any]

    def numbered(self, spec: GroupSpec) -> GroupSpec:
        """``spec`` with the backend's numbers of ranks instead of the world's."""
        place = {rank: index for index, rank in enumerate(self.ranks)}
        return replace(spec, ranks=tuple(place[rank] for rank in spec.ranks))

    def hosts(self, spec: GroupSpec) -> list[int]:
        """The number of the host of each rank of a group; ranks on one machine have equal numbers."""
        return self.backend.hosts(self.numbered(spec).ranks)

    def lost(self) -> frozenset[int]:
        """The ranks of the world that are known to be lost."""
        return frozenset(self.ranks[rank] for rank in self.backend.lost())


def connect_members(
    membership: Membership,
    ranks: tuple[int, ...],
    factory: BackendFactory,
    *,
    timeout: float,
    options: Mapping[str, Any],
    store: Store,
    status_page: object = None,
    lost: Callable[[], frozenset[int]],
    check: Callable[[], None],
) -> Links:
    """Connect some ranks of a world to one another; all of them must call it.

    Args:
        ranks: the members, numbered in the world.
        timeout: timeout in seconds until all are connected.
        store: a store that only these members use.
        status_page: the ``status_page()`` of the backend that connects all ranks of the world.
        lost: returns the lost ranks of the world.
        check: called while waiting for others; raises if they will never come.

    Raises:
        RendezvousError: a member was lost, or could not connect; RendezvousTimeout names late members.
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
        check()

    ours = replace(
        membership,
        rank=ranks.index(membership.rank),
        size=len(ranks),
        local_size=min(membership.local_size, len(ranks)),
        store=store,
        ranks=ranks,
        status_page=status_page,
        release=lambda seconds: None,
        abandon=lambda error: None,
        check=still_possible,
        connected=lambda: None,
    )
    try:
        backend = factory(ours, timeout=timeout, **options)
    except BaseException as error:
        try:
            said = f"rank {membership.rank} could not connect: {describe_error(error)}"
            store.compare_set(_FAILED, b"", said.encode("utf-8", "backslashreplace"))
        except (StoreError, WireError):
            pass  # the others run into their timeout
        raise
    return Links(backend, ranks, factory, dict(options))
