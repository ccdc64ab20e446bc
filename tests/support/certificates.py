"""Certificates for tests, of an authority that lasts as long as they do."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme


class Pair(NamedTuple):
    """A certificate and its key, as paths of PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1; its own is the file ``ca``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self._authority = trustme.CA(organization_name=name)
        self.ca = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, *, expired: bool = False) -> Pair:
        """A certificate under the common name ``name``; ``expired``: since yesterday."""
        until = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1) if expired else None
        issued = self._authority.issue_cert(
            "127.0.0.1",
            common_name=name,
            not_before=until and until - datetime.timedelta(days=1),
            not_after=until,
        )
        pair = Pair(self._folder / f"{self._name}-{name}.pem", self._folder / f"{self._name}-{name}.key")
        issued.cert_chain_pems[0].write_to_path(str(pair.cert))
        issued.private_key_pem.write_to_path(str(pair.key))
        return pair


def use_certificates(monkeypatch: pytest.MonkeyPatch, authority: Authority, pair: Pair) -> None:
    """Let connections that are made from now on trust ``authority`` and show ``pair``."""
    monkeypatch.setenv("SHOAL_TLS", "1")
    monkeypatch.setenv("SHOAL_TLS_CA", str(authority.ca))
    monkeypatch.setenv("SHOAL_TLS_CERT", str(pair.cert))
    monkeypatch.setenv("SHOAL_TLS_KEY", str(pair.key))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of an authority, and of a server and a client that it signed."""
    folder = tmp_path_factory.mktemp("keys")
    authority = Authority(folder)
    authority.ca.rename(folder / "ca.pem")
    for name in ("server", "client"):
        for file, end in zip(authority.issue(name), ("pem", "key"), strict=True):
            file.rename(folder / f"{name}.{end}")
    return folder
