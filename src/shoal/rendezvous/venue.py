"""The venues where ranks can meet, and the table of their URL schemes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult

from .. import config
from ..errors import UsageError
from ..net import Deadline
from ..store import Store, adopt
from ..store.external.url import redacted, split_url
from ..store.urls import check_scheme, known_schemes, load_scheme, open_parts, set_rendezvous_opener
from .addresses import resolve


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a process that wants to meet the others.

    Attributes:
        url: of the rendezvous, split.
        rank, size: None: determined by the launcher or the store.
        secret: the job's secret; b"": none.
        deadline: by which all ranks must have met.
        environ: the launcher's variables.
        host: identity of the host; None: that of the machine.
        job: name of the job; overrides the environment.
        launcher_job: see :class:`Membership`.
        serves: whether this process may start the store if there is none.
    """

    url: SplitResult
    rank: int | None
    size: int | None
    secret: bytes = field(repr=False)
    deadline: Deadline
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    host: str | None = None
    job: str | None = None
    launcher_job: str | None = None
    serves: bool = True


def nothing(*_: object) -> None:
    """Do nothing."""


#: what a user should do after a failed meeting, for error messages
START_AGAIN = "start the job again"


@dataclass(frozen=True, slots=True)
class Venue:
    """Where the ranks of a job meet, as opened by the handler of a URL's scheme.

    Attributes:
        store: shared by all ranks of the job; closed with the group.
        rank, size: of this process; None: determined by the store.
        local_rank, local_size: None: determined from the hosts of all ranks.
        job, epoch: of the ranks that meet; None: ``SHOAL_JOB`` and ``SHOAL_EPOCH``. The request's job has
            precedence.
        secret: of the venue, for a job without one; b"": none.
        private: only this job's user can read the store, so a secret can be agreed on in it.
        leaves_store_early: the store may end before the group, so the ranks leave the meeting once
            they are connected.
        address: numeric network address of the store, if any; ranks on other hosts listen on the interface
            with the route to it.
        advice: what a user should do after a failed meeting, as the end of a sentence.
        others_disconnected: in a process that serves the store and so must end last: returns whether
            all others have disconnected. None in other processes.
        on_complete: called when all ranks have met.
        close: called after the store is closed.
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
    leaves_store_early: bool = False
    address: str | None = None
    advice: str = START_AGAIN
    others_disconnected: Callable[[], bool] | None = None
    on_complete: Callable[[], None] = nothing
    close: Callable[[], None] = nothing


#: opens the venue of a URL
Handler = Callable[[Request], Venue]

_handlers: dict[str, Handler] = {}


def register_rendezvous(scheme: str, handler: Handler) -> None:
    """Register ``handler`` for URLs that start with ``scheme://``.

    :func:`shoal.init`, ``SHOAL_STORE``, ``shoal run --store`` and :func:`shoal.store.open_store` accept them.

    Args:
        scheme: lower-case letters, digits, ``+``, ``-`` and ``.``, starting with a letter.
        handler: called with a :class:`Request`; returns the :class:`Venue`. It may be called several times
            for one meeting, if the store is lost before all have met.

    Raises:
        UsageError: the scheme is malformed, or already has a handler.
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

    set_rendezvous_opener(scheme, open_store_there)


def unregister_rendezvous(scheme: str) -> None:
    """Undo :func:`register_rendezvous`; does nothing if there is no handler."""
    _handlers.pop(scheme, None)
    set_rendezvous_opener(scheme, None)


def parse_url(url: str) -> SplitResult:
    """Split ``url``; UsageError if it is malformed or has an unknown scheme."""
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
    """Open the venue of the request's URL: by its scheme's handler, or in a store of that scheme."""
    handler = _handlers.get(request.url.scheme)
    if handler is not None:
        return handler(request)
    store = open_parts(request.url, secret=request.secret, timeout=request.deadline.timeout)
    return Venue(store, request.rank, request.size, address=store_address(store))


def store_address(store: Store) -> str | None:
    """Return the numeric address of the host that serves ``store``; None if unknown."""
    if not store.host:
        return None
    try:
        return resolve(store.host, 0)[0]
    except OSError:
        return None


def caller_venue(store: object, request: Request) -> Venue:
    """Return the venue in a store of shoal or torch, which stays open when the group is closed.

    Raises UsageError if ``store`` is neither.
    """
    ours = adopt(store)
    # private: by passing the store, the caller trusts everyone who can read it.
    return Venue(ours.clone(), request.rank, request.size, private=True, address=store_address(ours))
