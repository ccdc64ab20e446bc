"""Hosts that ssh reaches, for all tests of this folder; they are skipped where there can be none."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

from tests.launch.conftest import PRELUDE
from tests.support.ssh_hosts import SshHosts, ssh_hosts, why_no_ssh_hosts


@pytest.fixture(scope="session")
def all_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    if reason := why_no_ssh_hosts():
        pytest.skip(reason)
    with ssh_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def hosts(all_hosts: SshHosts) -> Iterator[SshHosts]:
    """Hosts a, b and c, and the head; empty after each test, and the network whole."""
    yield all_hosts
    all_hosts.network.heal()
    all_hosts.await_empty()
    for path in all_hosts.folder.glob("told-*"):
        path.unlink()


def script(hosts: SshHosts, text: str) -> str:
    """Write a script that all hosts see; its name."""
    path = hosts.folder / "script.py"
    path.write_text(PRELUDE + textwrap.dedent(text))
    return path.name
