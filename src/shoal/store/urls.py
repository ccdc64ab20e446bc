"""From a URL to a store: the one table of schemes, wherever a store or a place to meet is named.

A scheme is registered by :func:`register_store`, or by ``shoal.register_rendezvous`` for a place that knows
more than its store.  A package that is installed can name a module of its own for a scheme, as an entry point
in the group ``shoal.stores``: the module is imported when the scheme is asked for, and registers it.  So
``shoal run``, which runs no code of the user's, knows the scheme too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol
from urllib.parse import SplitResult, unquote

from .. import config
from ..errors import UsageError
from .base import Store
from .external.url import redacted, split_url
from .file.store import FileStore
from .tcp.client import TCPStore

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


class Opener(Protocol):
    """Opens the store that a URL of one scheme names."""

    def __call__(self, url: SplitResult, *, secret: bytes, timeout: float | None) -> Store: ...


_openers: dict[str, Opener] = {}
#: of the schemes that have a handler of ``shoal.register_rendezvous``
_places: dict[str, Opener] = {}

#: where installed packages name the modules that register their schemes
ENTRY_POINTS = "shoal.stores"


def register_store(scheme: str, opener: Opener) -> None:
    """Give URLs that start with ``scheme://`` a meaning, wherever a store or a place to meet is named.

    That is :func:`open_store`, :func:`shoal.init`, ``SHOAL_STORE`` and ``shoal run --store``.  Where a scheme
    has a handler of :func:`shoal.register_rendezvous` too, the ranks meet at the handler's place.

    Args:
        scheme: lower-case letters, digits, ``+``, ``-`` and ``.``, a letter first.
        opener: called once in each rank, with the job's secret (b"" if none was given) and the time
            that requests to the store may take.

    Raises:
        UsageError: the scheme is malformed, or taken.
    """
    check_scheme("store", scheme)
    if scheme in _openers:
        raise UsageError(f"stores of scheme {scheme!r} are registered already")
    _openers[scheme] = opener


def check_scheme(what: str, scheme: str) -> None:
    """Raise UsageError unless a URL can have the scheme; ``what`` it is for stands in the message."""
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise UsageError(f"{what} scheme {scheme!r}: expected lower-case letters, digits, '+', '-', '.'")


def register_place(scheme: str, opener: Opener | None) -> None:
    """Let :func:`open_store` open the store of a place to meet where its scheme has no store of its own.

    None takes that back.
    """
    if opener is None:
        _places.pop(scheme, None)
    else:
        _places[scheme] = opener


def load_scheme(scheme: str, known: Iterable[str] = ()) -> bool:
    """Whether ``scheme`` is registered, or is one of ``known``; an installed package may register it now."""

    def registered() -> bool:
        return scheme in _openers or scheme in _places or scheme in known

    if not registered():
        for entry in _installed():
            if entry.name == scheme:
                entry.load()
    return registered()


def known_schemes(more: Iterable[str] = ()) -> str:
    """Every scheme that there is, for messages."""
    schemes = {*_openers, *_places, *more, *(entry.name for entry in _installed())}
    return ", ".join(f"{scheme}://" for scheme in sorted(schemes))


def _installed() -> EntryPoints:
    from importlib import metadata  # slow to import, and asked for by few

    return metadata.entry_points(group=ENTRY_POINTS)


def open_store(url: str, *, secret: bytes | None = None, timeout: float | None = None) -> Store:
    """Open the store that ``url`` names.

    Args:
        url: ``tcp://host:port``, ``file:///path``, ``etcd://host:port``,
            ``redis://host:port``, or of a registered scheme.
        secret: the job's secret, for stores behind a connection; None: ``SHOAL_SECRET``, or what the file
            ``SHOAL_SECRET_FILE`` holds; ``b""``: no secret.
        timeout: the store's default deadline in seconds; ``SHOAL_TIMEOUT`` unless given.

    Raises:
        UsageError: the URL makes no sense, or its scheme is unknown.
        ConfigurationError: the file of the secret cannot be read.
        StoreError, WireError: what the store raises when it cannot be opened.
    """
    if secret is None:
        secret = config.secret()
    parts = split_url("store", url)
    if not load_scheme(parts.scheme):
        raise UsageError(f"store {redacted(url)!r}: unknown scheme, expected one of {known_schemes()}")
    return open_parts(parts, secret=secret, timeout=timeout)


def open_parts(parts: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
    """:func:`open_store` of a URL that was taken apart; its scheme is registered."""
    opener = _openers.get(parts.scheme) or _places[parts.scheme]
    return opener(parts, secret=secret, timeout=timeout)


def _open_tcp(url: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
    try:
        port = url.port
    except ValueError:
        port = None
    if not url.hostname or not port:
        raise UsageError(f"store {url.geturl()!r}: expected tcp://host:port")
    return TCPStore(url.hostname, port, secret, timeout=timeout)


def _open_file(url: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
    if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
        raise UsageError(f"store {url.geturl()!r}: expected file:///absolute/path")
    return FileStore(unquote(url.path), timeout=timeout)


def open_outside(url: SplitResult, *, job: str, timeout: float | None) -> Store:
    """Open a store on servers that hold those of several jobs: one of :data:`OUTSIDE`."""
    if url.scheme in ("redis", "rediss"):
        from .redis.store import open_redis  # few need it

        return open_redis(url, job=job, timeout=timeout)
    from .etcd.store import open_etcd

    return open_etcd(url, job=job, timeout=timeout)


def _open_outside(url: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
    return open_outside(url, job=config.JOB.get(), timeout=timeout)


#: the schemes of stores on servers that are not shoal's
OUTSIDE = ("etcd", "etcds", "redis", "rediss")

register_store("tcp", _open_tcp)
register_store("file", _open_file)
for _scheme in OUTSIDE:
    register_store(_scheme, _open_outside)
