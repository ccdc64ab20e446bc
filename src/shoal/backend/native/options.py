"""Options of the native backend: each is an argument of ``shoal.init`` or an environment variable."""

from __future__ import annotations

from ... import config
from ...common.keywords import checked_seconds
from ...errors import UsageError

#: how a rank may be told to reach others on its host
TRANSPORTS = ("auto", "shm", "tcp")


def checked_transport(transport: str | None) -> str:
    """``transport``, or for None ``SHOAL_TRANSPORT``.

    Raises:
        UsageError: there is no such way.
    """
    if transport is None:
        return config.TRANSPORT.get()
    if transport not in TRANSPORTS:
        raise UsageError(f"transport={transport!r}: expected one of {', '.join(TRANSPORTS)}")
    return transport


def checked_heartbeat(seconds: float | None) -> float:
    """``seconds``, or for None ``SHOAL_HEARTBEAT_TIMEOUT``.

    Raises:
        UsageError: it is no positive number.
    """
    if seconds is None:
        return config.HEARTBEAT_TIMEOUT.get()
    return checked_seconds("heartbeat_timeout", seconds, finite=True)


def checked_limit(limit: int | None) -> int | None:
    """``limit`` in bytes, or for None ``SHOAL_SHARED_MEMORY_LIMIT``, or None: whatever the machine has.

    Raises:
        UsageError: it is no number, or too small to run with.
    """
    what = "shared_memory_limit"
    if limit is None:
        limit, what = config.SHARED_MEMORY_LIMIT.get(), config.SHARED_MEMORY_LIMIT.name
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1 << 20):
        raise UsageError(f"{what}={limit!r}: expected a number of bytes, at least a mebibyte (2**20)")
    return limit
