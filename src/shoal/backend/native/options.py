"""The options of the native backend: their checks and defaults.  Without torch."""

from __future__ import annotations

import os

from ... import config
from ...common.arguments import checked_count, checked_seconds
from ...errors import UsageError

#: Values of ``transport=``: how a rank reaches other ranks on its host.
TRANSPORTS = ("auto", "shm", "tcp")


def checked_transport(transport: str | None) -> str:
    """Return ``transport``, or ``SHOAL_TRANSPORT`` if it is None; raise UsageError if it is invalid."""
    if transport is None:
        return config.TRANSPORT.get()
    if transport not in TRANSPORTS:
        raise UsageError(f"transport={transport!r}: expected one of {', '.join(TRANSPORTS)}")
    return transport


def checked_heartbeat(seconds: float | None) -> float:
    """Return ``seconds``, or ``SHOAL_HEARTBEAT_TIMEOUT`` if it is None.

    Raises UsageError unless the value is a positive finite number.
    """
    if seconds is None:
        return config.HEARTBEAT_TIMEOUT.get()
    return checked_seconds("heartbeat_timeout", seconds, finite=True)


def checked_shared_memory_limit(limit: int | None) -> int | None:
    """Return ``limit`` in bytes, or ``SHOAL_SHARED_MEMORY_LIMIT`` if it is None; None: no limit.

    Raises UsageError unless the value is an integer of at least 1 MiB.
    """
    what = "shared_memory_limit"
    if limit is None:
        limit, what = config.SHARED_MEMORY_LIMIT.get(), config.SHARED_MEMORY_LIMIT.name
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1 << 20):
        raise UsageError(f"{what}={limit!r}: expected a number of bytes, at least a mebibyte (2**20)")
    return limit


def checked_progress_threads(number: int | None) -> int:
    """Return ``number``, or ``SHOAL_PROGRESS_THREADS`` if it is None.

    Raises UsageError unless the value is a whole number from 1 to 64.
    """
    if number is None:
        return config.PROGRESS_THREADS.get()
    if checked_count("progress_threads", number) > config.MAX_PROGRESS_THREADS:
        raise UsageError(f"progress_threads={number}: expected at most {config.MAX_PROGRESS_THREADS}")
    return number


def memory_size(local_size: int, limit: int | None) -> tuple[int, int]:
    """Return the bytes of address space to reserve, and the maximum bytes in use."""
    limit = checked_shared_memory_limit(limit)
    if limit is None:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Every rank maps the memory of every other; ranks that are threads share one address space.
    most: int = 2**46 // max(local_size, 1) ** 2
    capacity = min(max(limit, 1 << 30) + (1 << 28), most)
    return capacity // 4096 * 4096, limit
