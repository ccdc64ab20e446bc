"""From a URL to a store."""

from __future__ import annotations

import re
from typing import Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from ..errors import UsageError
from .base import Store
from .file import FileStore
from .tcp import TCPStore


class Opener(Protocol):
    """Opens the store that a URL of one scheme names."""

    def __call__(self, url: SplitResult, *, secret: bytes, timeout: float | None) -> Store: ...


_openers: dict[str, Opener] = {}


def register_store(scheme: str, opener: Opener) -> None:
    """Give URLs that start with ``scheme://`` a meaning, wherever a store or a place to meet is named.

    That is :func:`open_store`, :func:`shoal.init` and ``SHOAL_STORE``.  A scheme that has a handler of
    :func:`shoal.register_rendezvous` too is met at by that one.

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


def store_schemes() -> list[str]:
    """Every scheme that :func:`open_store` knows."""
    return sorted(_openers)


def open_store(url: str, *, secret: bytes = b"", timeout: float | None = None) -> Store:
    """Open the store that ``url`` names.

    Args:
        url: ``tcp://host:port`` or ``file:///path``, or of a registered scheme.
        secret: the job's secret, for stores behind a connection.
        timeout: the store's default deadline in seconds; ``SHOAL_TIMEOUT`` unless given.

    Raises:
        UsageError: the URL makes no sense, or its scheme is unknown.
        StoreError, WireError: what the store raises when it cannot be opened.
    """
    parts = urlsplit(url)
    if parts.scheme not in _openers:
        known = ", ".join(f"{scheme}://" for scheme in store_schemes())
        raise UsageError(f"store {url!r}: unknown scheme, expected one of {known}")
    return open_parts(parts, secret=secret, timeout=timeout)


def open_parts(parts: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
    """:func:`open_store` of a URL that was taken apart; its scheme is one of :func:`store_schemes`."""
    return _openers[parts.scheme](parts, secret=secret, timeout=timeout)


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


register_store("tcp", _open_tcp)
register_store("file", _open_file)
