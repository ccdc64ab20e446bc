"""Torch's timeouts, converted to seconds."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias

from .. import config
from ..errors import UsageError

#: A ``timedelta``, as in torch, or a number of seconds.
Duration: TypeAlias = timedelta | float

#: The default timeout of operations: shoal's, not torch's 30 minutes.
default_pg_timeout = timedelta(seconds=config.TIMEOUT.default)

#: The timeout of closing a group, in seconds, where torch's function has no argument for it.
CLOSING = 10.0


def seconds(timeout: Duration | None) -> float | None:
    """Return a duration in seconds, or None for None.

    Raises:
        UsageError: ``timeout`` is neither a ``timedelta`` nor a number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, (int, float)):
        return float(timeout)
    raise UsageError(f"timeout: expected a timedelta or a number of seconds, got {timeout!r}")


def limit(timeout: Duration | None) -> float | None:
    """Return a duration in seconds, or None for None, zero and negative values (torch: no limit)."""
    given = timeout.total_seconds() if timeout.__class__ is timedelta else seconds(timeout)
    return None if given is None or given <= 0 else given
