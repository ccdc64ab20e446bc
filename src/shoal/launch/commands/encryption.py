"""What ``--tls`` of the commands does."""

from __future__ import annotations

import os

from ... import config
from ...errors import UsageError
from ...store.urls import OUTSIDE


def demand_tls(store: str | None) -> None:
    """Encrypt the connections of this process, and of those that it starts, as ``SHOAL_TLS=1`` does.

    Args:
        store: URL of the store that the command names, if it names one.

    Raises:
        UsageError: that store has a TLS of its own, which its URL does not ask for.
    """
    scheme = "" if store is None else store.partition("://")[0]
    if f"{scheme}s" in OUTSIDE:
        raise UsageError(f"--tls does not encrypt a store of {scheme}://: name it by {scheme}s://")
    os.environ[config.TLS.name] = "1"
