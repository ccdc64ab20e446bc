"""Members of a group that connect by themselves: who cannot, or is lost, ends the waiting of the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from shoal.errors import RendezvousError, StoreError
from shoal.links import connect_members
from shoal.rendezvous.membership import Membership
from shoal.store import MemoryStore, Store

#: the members' ranks in the world
RANKS = (1, 4, 6)


def _connect(rank: int, store: Store, factory: Any, lost: Collection[int] = ()) -> Any:
    world = Membership(
        rank=rank, size=8, local_rank=rank, local_size=8, store=MemoryStore(5), job="job", epoch=0,
        secret=b"secret", interface="127.0.0.1", host="here",
    )  # fmt: skip
    how: dict[str, Any] = {
        "timeout": 5.0,
        "options": {},
        "lost": lambda: frozenset(lost),
        "check": lambda: None,
    }
    return connect_members(world, RANKS, factory, store=store, **how)


def _cut(membership: Membership, *, timeout: float) -> Any:
    raise ConnectionError(f"rank {membership.ranks[membership.rank]} has no cable")


def _looks(membership: Membership, *, timeout: float) -> Any:
    membership.check()
    return membership


def test_members_hear_why_another_one_cannot_connect() -> None:
    with MemoryStore(5) as store:
        assert _connect(4, store, _looks).ranks == RANKS  # nobody has failed yet
        for rank in (4, 6):
            with pytest.raises(ConnectionError, match=f"rank {rank} has no cable"):
                _connect(rank, store, _cut)
        with pytest.raises(
            RendezvousError, match=r"^rank 4 could not connect: ConnectionError: rank 4 has no cable$"
        ):
            _connect(1, store, _looks)  # of the first failure


def test_a_member_that_cannot_connect_raises_its_own_error_though_nobody_can_be_told() -> None:
    store = MemoryStore(5)
    store.close()
    with pytest.raises(StoreError):
        store.check(["failed"])
    with pytest.raises(ConnectionError, match="rank 1 has no cable"):
        _connect(1, store, _cut)


def test_a_lost_rank_ends_the_waiting_for_it_alone() -> None:
    def awaits_the_third(membership: Membership, *, timeout: float) -> Any:
        membership.check([2])
        return membership

    with MemoryStore(5) as store, pytest.raises(RendezvousError, match="rank 4 died while the members"):
        _connect(1, store, _looks, lost=[0, 4])  # rank 0 is no member
    with MemoryStore(5) as store:
        assert _connect(1, store, awaits_the_third, lost=[0, 4]).backend.rank == 0
