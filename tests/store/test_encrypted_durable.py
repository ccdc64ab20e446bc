"""Everything that a durable store promises, over TLS: each server that comes again has a key of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'shoal[tls]'")

from .test_durable import *  # noqa: F403
from .test_durable_kills import test_a_durable_store_is_linearizable_though_its_server_is_killed  # noqa: F401


@pytest.fixture(autouse=True)
def _encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_TLS_CA", "SHOAL_TLS_CERT", "SHOAL_TLS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOAL_TLS", "1")
