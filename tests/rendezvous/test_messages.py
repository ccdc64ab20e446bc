"""How many messages a meeting takes."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import MemoryStore
from shoal.common.process_identity import ProcessIdentity
from shoal.rendezvous import RendezvousPoint, Venue, protocol
from shoal.rendezvous.protocol import Rendezvous

from .together import all_well, meet_in, request, together


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that memory stores have executed."""
    requests: list[Any] = []
    execute = MemoryStore._execute

    def executing(self: MemoryStore, request: Any, *args: Any) -> Any:
        requests.append(request)
        return execute(self, request, *args)

    monkeypatch.setattr(MemoryStore, "_execute", executing)
    return requests


def test_the_number_of_store_operations_does_not_depend_on_the_size(
    executed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_FIRST_CHECK_INTERVAL_S", 60.0)  # nobody is late

    def operations(size: int) -> float:
        executed.clear()
        with MemoryStore() as store:
            all_well(together(*[lambda rank=rank: meet_in(store, rank, size) for rank in range(size)]))
        return (len(executed) - 3) / size  # the last to come reads all descriptors and writes what it found

    assert operations(2) == operations(16) <= 8


def test_a_look_at_those_who_wait_too_is_one_message(executed: list[Any]) -> None:
    with MemoryStore() as store:
        venue, identity = Venue(store, rank=0, size=2), ProcessIdentity.current()
        waiting = Rendezvous(RendezvousPoint(venue, request(), "job", 0, "host", identity))
        assert waiting._try_enter()
        executed.clear()
        waiting.check()
        assert len(executed) == 1
