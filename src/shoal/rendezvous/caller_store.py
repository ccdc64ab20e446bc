"""A place to meet that the caller has already: a store."""

from __future__ import annotations

from ..store import adopt
from .venue import Request, Venue
from .venue import store_address as store_address


def given(store: object, request: Request) -> Venue:
    """The venue in ``store``, which stays open when the group is closed.

    Args:
        store: one of ours, or one of ``torch.distributed``.

    Raises:
        UsageError: it is neither.
    """
    ours = adopt(store)
    # Whoever can read it is trusted, as the caller says by handing it over.
    return Venue(ours.clone(), request.rank, request.size, private=True, address=store_address(ours))
