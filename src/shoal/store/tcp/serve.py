"""Hosting of a TCP store in the foreground."""

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
    """Host a store until ``stop`` is set or a signal ends the process.

    Args:
        address: ``host:port``, or ``host`` for a port that the kernel chooses; IPv6 in brackets.
        secret: every client must prove to know it; required except on loopback.
        records: initial keys and values, such as the job's record.
        log: directory for the data, see :class:`DurableStoreServer`; None: in memory only.
        announce: called with the store's URL when clients can connect.
        stop: ends the server when set, by a signal handler or another thread.

    Raises:
        UsageError: the address is malformed, or requires a secret.
        ConfigurationError, StoreError: the directory cannot be used.
        WireError: the address is in use, or does not belong to this host.
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
    """Split ``host:port``; port 0 if there is none. IPv6 addresses are in brackets."""
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
