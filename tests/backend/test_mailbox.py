"""A backend from a package of somebody else, which passes the conformance suite."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from shoal.backend.base import GroupSpec
from shoal.backend.registry import backend_names, register_backend, unregister_backend
from shoal.errors import RemoteError, UsageError
from shoal.group import ProcessGroup
from shoal.store import MemoryStore, PrefixStore
from shoal.testing import run_threads
from shoal.testing.conformance import BackendConformance


class TestMailbox(BackendConformance):
    backend = "mailbox"


def _sum(group: ProcessGroup) -> float:
    return group.all_reduce(torch.ones(1)).wait().item()


def test_a_backend_is_found_by_the_entry_point_of_its_package() -> None:
    assert "mailbox" in backend_names()
    assert run_threads(_sum, 2, backend="mailbox", timeout=30) == [2.0, 2.0]


def test_a_backend_is_registered_by_a_call() -> None:
    from shoal_mailbox import MailboxBackend

    register_backend("letters", MailboxBackend)
    try:
        assert run_threads(_sum, 3, backend="letters", timeout=30) == [3.0] * 3
        with pytest.raises(UsageError, match="letters"):
            register_backend("letters", MailboxBackend)
    finally:
        unregister_backend("letters")
    with pytest.raises(UsageError, match="letters"):
        run_threads(_sum, 2, backend="letters", timeout=30)


def test_a_peer_that_died_before_it_had_sent_the_letter_of_its_number_keeps_no_close_waiting() -> None:
    from shoal_mailbox.channel import MailboxChannel

    store = MemoryStore()
    spec = GroupSpec(name="world", ident=7, rank=0, ranks=(0, 1))
    channel = MailboxChannel(store, spec)
    PrefixStore("mailbox/7/", store).add("0/count", 1)
    channel.close(60.0)
    assert not any(thread.name == "mailbox-world" for thread in threading.enumerate())


def test_options_that_the_backend_does_not_know_are_refused() -> None:
    with pytest.raises((RemoteError, TypeError), match="no options, got speed"):
        run_threads(_sum, 1, backend="mailbox", timeout=30, speed="high")


def test_the_third_party_package_uses_the_public_interface_only() -> None:
    package = Path(__file__).parent / "thirdparty" / "shoal_mailbox"
    lines = [line for path in package.glob("*.py") for line in path.read_text().splitlines()]
    imports = {line for line in lines if line.startswith(("import", "from")) and "shoal" in line}
    assert imports
    assert not any("_core" in line or " _" in line or "group" in line for line in imports)
