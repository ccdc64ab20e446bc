"""The places where ranks can meet, and the table of URL schemes that lead to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import SplitResult

from .. import config
from ..errors import UsageError
from ..net import Deadline
from ..store import Store
from ..store.external.url import redacted, split_url
from ..store.urls import check_scheme, known_schemes, load_scheme, open_parts, register_place
from .host import resolve


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a process that wants to meet the others.

    Attributes:
        url: where to meet, taken apart.
        rank, size: None where the launcher or the store has to say.
        secret: the job's secret, b"" for none.
        deadline: until when the meeting must have succeeded.
        environ: the launcher's variables.
        host: identity of the host if it is not the machine's own.
        job: name of the job, in the place of what the environment says.
        serves: whether this process may start the store, if nobody has.
    """

    url: SplitResult
    rank: int | None
    size: int | None
    secret: bytes = field(repr=False)
    deadline: Deadline
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    host: str | None = None
    job: str | None = None
    serves: bool = True


def nothing() -> None:
    """Nothing is to be done."""


#: what a user does after a meeting has failed, as error messages say it
START_AGAIN = "start the job again"


@dataclass(frozen=True, slots=True)
class Venue:
    """Where the ranks of a job meet, as the handler of a URL's scheme found it.

    Attributes:
        store: shared by all ranks of the job; closed with the group.
        rank, size: of this process; None where the store has to say.
        local_rank, local_size: None where they have to be found from the hosts of all ranks.
        job, epoch: whose place it is; None: ``SHOAL_JOB`` and ``SHOAL_EPOCH``.  The
            request's job comes first.
        secret: of the place, for a job that was given none; b"" if the place has none.
        private: nobody but this job's user can read the store, so that a secret can be agreed in it.
        brief: the store may be gone before the group, so the ranks leave the meeting when they are connected.
        address: numeric network address of the store, where it has one; ranks on other hosts listen on
            the interface that leads there.
        advice: what a user does after a meeting here has failed, as the end of a sentence.
        alone: None, but for a process that serves the store to the others and so must be the last to go:
            tells whether all others disconnected.
        met: called when all ranks have met.
        close: called after the store was closed.
    """

    store: Store
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    job: str | None = None
    epoch: int | None = None
    secret: bytes = field(default=b"", repr=False)
    private: bool = False
    brief: bool = False
    address: str | None = None
    advice: str = START_AGAIN
    alone: Callable[[], bool] | None = None
    met: Callable[[], None] = nothing
    close: Callable[[], None] = nothing


class Handler(Protocol):
    """Opens the place that a URL names."""

    def __call__(self, request: Request, /) -> Venue: ...


_handlers: dict[str, Handler] = {}


def register_rendezvous(scheme: str, handler: Handler) -> None:
    """Give URLs that start with ``scheme://`` a meaning wherever a place to meet, or its store, is named.

    That is :func:`shoal.init`, ``SHOAL_STORE``, ``shoal run --store`` and :func:`shoal.store.open_store`.

    Args:
        scheme: lower-case letters, digits, ``+``, ``-`` and ``.``, a letter first.
        handler: called with a :class:`Request`; returns the :class:`Venue`.  It may be called several
            times for one meeting, when the store is lost before all have met.

    Raises:
        UsageError: the scheme is malformed, or has a handler already.
    """
    check_scheme("rendezvous", scheme)
    if scheme in _handlers:
        raise UsageError(f"rendezvous scheme {scheme!r} has a handler already; choose another name")
    _handlers[scheme] = handler

    def open_store_there(url: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
        deadline = Deadline(config.TIMEOUT.get() if timeout is None else timeout)
        venue = handler(Request(url, None, None, secret, deadline))
        venue.store.call_when_closed(venue.close)
        return venue.store

    register_place(scheme, open_store_there)


def unregister_rendezvous(scheme: str) -> None:
    """Take back a :func:`register_rendezvous`; does nothing when there was none."""
    _handlers.pop(scheme, None)
    register_place(scheme, None)


def parse_url(url: str) -> SplitResult:
    """``url`` taken apart.

    Raises:
        UsageError: it is no URL, or nobody knows its scheme; the message lists those registered.
    """
    if not isinstance(url, str):
        raise UsageError(f"rendezvous url {url!r}: expected a str")
    shown = redacted(url)
    parts = split_url("rendezvous url", url)
    if "://" not in url:
        raise UsageError(
            f"rendezvous url {shown!r}: expected one that starts with {known_schemes(_handlers)}"
        )
    if not load_scheme(parts.scheme, _handlers):
        raise UsageError(
            f"rendezvous url {shown!r}: neither a handler nor a store is registered for {parts.scheme}://; "
            f"known are {known_schemes(_handlers)}"
        )
    return parts


def open_venue(request: Request) -> Venue:
    """The venue that the request's URL names: what its scheme's handler opens, or a store of that scheme."""
    handler = _handlers.get(request.url.scheme)
    if handler is not None:
        return handler(request)
    store = open_parts(request.url, secret=request.secret, timeout=request.deadline.timeout)
    return Venue(store, request.rank, request.size, address=store_address(store))


def store_address(store: Store) -> str | None:
    """Numeric address of the host that serves ``store``, where that is known."""
    if not store.host:
        return None
    try:
        return resolve(store.host, 0)[0]
    except OSError:
        return None
