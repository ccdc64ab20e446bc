"""The table of URL schemes of stores and rendezvous points.

:func:`register_store` adds a scheme, and so does ``shoal.register_rendezvous``, for a rendezvous point that
provides more than a store. An installed package can name a module for a scheme as an entry point in the group
``shoal.stores``: the module is imported when the scheme is first used, and registers it. So ``shoal run``,
which runs no user code, knows the scheme too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, unquote

from .. import config
from ..errors import UsageError
from .base import Store
from .external.url import parse_external_url, redacted, split_url
from .file import FileStore
from .tcp.client import TCPStore

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


class Opener(Protocol):
    """Opens the store that a URL of one scheme names."""

    def __call__(self, url: SplitResult, *, secret: bytes, timeout: float | None) -> Store: ...


_openers: dict[str, Opener] = {}
#: openers of the schemes that have a handler of ``shoal.register_rendezvous``
_rendezvous_openers: dict[str, Opener] = {}

#: group of the entry points with which installed packages name modules that register schemes
ENTRY_POINTS = "shoal.stores"


def register_store(scheme: str, opener: Opener) -> None:
    """Register ``opener`` for URLs that start with ``scheme://``.

    :func:`open_store`, :func:`shoal.init`, ``SHOAL_STORE`` and ``shoal run --store`` accept such URLs. If the
    scheme also has a handler of :func:`shoal.register_rendezvous`, the ranks use the handler's venue.

    Args:
        scheme: lower-case letters, digits, ``+``, ``-`` and ``.``, starting with a letter.
        opener: called once in each rank, with the job's secret (b"" if none was given) and the timeout of
            requests to the store.

    Raises:
        UsageError: the scheme is malformed or already registered.
    """
    check_scheme("store", scheme)
    if scheme in _openers:
        raise UsageError(f"stores of scheme {scheme!r} are registered already")
    _openers[scheme] = opener


def check_scheme(what: str, scheme: str) -> None:
    """Raise UsageError unless ``scheme`` is valid in a URL; the message says that it is for ``what``."""
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise UsageError(f"{what} scheme {scheme!r}: expected lower-case letters, digits, '+', '-', '.'")


def set_rendezvous_opener(scheme: str, opener: Opener | None) -> None:
    """Set the opener of a rendezvous scheme that has no store of its own; None removes it."""
    if opener is None:
        _rendezvous_openers.pop(scheme, None)
    else:
        _rendezvous_openers[scheme] = opener


def load_scheme(scheme: str, known: Iterable[str] = ()) -> bool:
    """Return whether ``scheme`` is registered or in ``known``; imports the package that provides it."""

    def registered() -> bool:
        return scheme in _openers or scheme in _rendezvous_openers or scheme in known

    if not registered():
        for entry in _installed():
            if entry.name == scheme:
                entry.load()
    return registered()


def known_schemes(more: Iterable[str] = ()) -> str:
    """Return all known schemes, for messages."""
    schemes = {*_openers, *_rendezvous_openers, *more, *(entry.name for entry in _installed())}
    return ", ".join(f"{scheme}://" for scheme in sorted(schemes))


def _installed() -> EntryPoints:
    from importlib import metadata  # slow to import and rarely needed

    return metadata.entry_points(group=ENTRY_POINTS)


def open_store(url: str, *, secret: str | bytes | None = None, timeout: float | None = None) -> Store:
    """Open the store that ``url`` names.

    Args:
        url: ``tcp://host:port``, ``file:///path``, ``etcd://host:port``,
            ``redis://host:port``, or of a registered scheme.
        secret: the job's secret, for stores on the network; None: ``SHOAL_SECRET``, or the content of the
            file ``SHOAL_SECRET_FILE``; ``b""``: no secret.
        timeout: the store's default deadline in seconds; None: ``SHOAL_TIMEOUT``.

    Raises:
        UsageError: the URL is malformed, or its scheme is unknown.
        ConfigurationError: the file of the secret cannot be read.
        StoreError, WireError: the store cannot be opened.
    """
    key = config.secret() if secret is None else config.encoded_secret(secret)
    parts = split_url("store", url)
    if not load_scheme(parts.scheme):
        raise UsageError(f"store {redacted(url)!r}: unknown scheme, expected one of {known_schemes()}")
    return open_parts(parts, secret=key, timeout=timeout)


def open_parts(parts: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
    """Open the store of a URL that is already split and whose scheme is registered."""
    opener = _openers.get(parts.scheme) or _rendezvous_openers[parts.scheme]
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


def open_external(url: SplitResult, *, job: str, timeout: float | None) -> Store:
    """Open a store on third-party servers, which jobs share: a scheme of :data:`EXTERNAL_SCHEMES`."""
    from .external.tls import tls_context  # rarely needed, as the stores below

    encrypted = url.scheme in ("etcds", "rediss")
    is_redis = url.scheme in ("redis", "rediss")
    parsed = parse_external_url(url, 6379 if is_redis else 2379, tls=encrypted, databases=is_redis)
    access: dict[str, Any] = {
        "tls": tls_context(parsed.ca, parsed.cert, parsed.key) if encrypted else None,
        "user": parsed.user,
        "password": parsed.password,
        "timeout": timeout,
    }
    if is_redis:
        from .redis.store import RedisStore

        return RedisStore(parsed.servers[0], job, database=parsed.database, **access)
    from .etcd.store import EtcdStore

    return EtcdStore(parsed.servers, job, **access)


def _open_external(url: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
    return open_external(url, job=config.JOB.get(), timeout=timeout)


#: the schemes of stores on third-party servers
EXTERNAL_SCHEMES = ("etcd", "etcds", "redis", "rediss")

register_store("tcp", _open_tcp)
register_store("file", _open_file)
for _scheme in EXTERNAL_SCHEMES:
    register_store(_scheme, _open_external)
