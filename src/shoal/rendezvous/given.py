"""A place to meet that the caller has already: a store."""

from __future__ import annotations

from ..store import PrefixStore, Store, adopt
from .host import resolve
from .venue import Request, Venue


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


def store_address(store: Store) -> str | None:
    """Numeric address of the host that serves ``store``, where that is known."""
    while isinstance(store, PrefixStore):
        store = store.store
    host = getattr(store, "host", None)
    if not host:
        return None
    try:
        return resolve(host, 0)[0]
    except OSError:
        return None
