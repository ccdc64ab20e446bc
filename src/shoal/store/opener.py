"""From a URL to a store."""

from __future__ import annotations

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
    """Let :func:`open_store` open URLs of ``scheme`` with ``opener``.

    Raises:
        UsageError: the scheme is taken.
    """
    if scheme in _openers:
        raise UsageError(f"stores of scheme {scheme!r} are registered already")
    _openers[scheme] = opener


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
    opener = _openers.get(parts.scheme)
    if opener is None:
        known = ", ".join(f"{scheme}://" for scheme in sorted(_openers))
        raise UsageError(f"store {url!r}: unknown scheme, expected one of {known}")
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


register_store("tcp", _open_tcp)
register_store("file", _open_file)
