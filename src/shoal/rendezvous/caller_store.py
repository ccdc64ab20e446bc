"""The venue in a store that the caller provides."""

from __future__ import annotations

from ..store import adopt
from .venue import Request, Venue
from .venue import store_address as store_address


def given(store: object, request: Request) -> Venue:
    """Return the venue in a store of shoal or torch, which stays open when the group is closed.

    Raises UsageError if ``store`` is neither.
    """
    ours = adopt(store)
    # private: by passing the store, the caller trusts everyone who can read it.
    return Venue(ours.clone(), request.rank, request.size, private=True, address=store_address(ours))
