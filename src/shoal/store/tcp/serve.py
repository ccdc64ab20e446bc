"""Hosting a TCP store by itself, in the foreground."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import UsageError
from .durable_server import DurableStoreServer
from .server import TCPStoreServer


def serve(
    address: str,
    *,
    secret: bytes,
    records: Mapping[str, bytes] | None = None,
    log: str | Path | None = None,
    announce: Callable[[str], None] = lambda url: None,
    stop: threading.Event | None = None,
) -> None:
    """Host a store until ``stop`` is set or a signal ends it.

    Args:
        address: ``host:port``, or ``host`` for a port that the kernel chooses; IPv6 in brackets.
        secret: what every client must prove to hold; needed for anything but loopback.
        records: keys and values that are there from the beginning, such as the job's record.
        log: directory in which the data is kept, see :class:`DurableStoreServer`; None: in memory alone.
        announce: called with the store's URL once clients can connect.
        stop: ends the serving when set, by a signal handler or another thread.

    Raises:
        UsageError: the address makes no sense, or needs a secret.
        ConfigurationError, StoreError: the directory cannot be used.
        WireError: the address is in use, or not this host's.
    """
    host, port = parse_address(address)
    server: TCPStoreServer
    if log is None:
        server = TCPStoreServer(host, port, secret, records=records)
    else:
        server = DurableStoreServer(log, host, port, secret, records=records)
    with server:
        announce(server.url)
        (stop or threading.Event()).wait()


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` as host and number; port 0 when there is none.  IPv6 addresses are in brackets."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or port.endswith("]"):
        host, port = address.strip(), "0"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"address {address!r}: put an IPv6 address in brackets, as in [::1]:29400")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"address {address!r}: expected host:port with a port up to 65535")
    return host, int(port)
