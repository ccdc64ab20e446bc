"""The option ``--tls`` of ``shoal run`` and ``shoal store``."""

from __future__ import annotations

import os

from ... import config
from ...errors import UsageError
from ...store.urls import OUTSIDE


def demand_tls(store: str | None) -> None:
    """Set ``SHOAL_TLS=1`` for this process and its children.

    Args:
        store: URL of the store given on the command line, if any.

    Raises:
        UsageError: TLS of that store is requested by another scheme of its URL.
    """
    scheme = "" if store is None else store.partition("://")[0]
    if f"{scheme}s" in OUTSIDE:
        raise UsageError(f"--tls does not encrypt a {scheme}:// store: use {scheme}s:// in its URL")
    os.environ[config.TLS.name] = "1"
