"""The network addresses of this machine."""

from __future__ import annotations

from shoal.rendezvous.addresses import address_on_route_to, is_local_address, is_loopback, resolve
from shoal.rendezvous.point import RendezvousPoint
from shoal.rendezvous.venue import Venue
from shoal.store import MemoryStore

from .together import request


def test_addresses() -> None:
    assert resolve("localhost", 1)[0] == "127.0.0.1"
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("192.0.2.1")
    assert is_local_address("127.0.0.1")
    assert not is_local_address("192.0.2.1")
    assert is_local_address(address_on_route_to("127.0.0.1"))
    assert is_local_address(address_on_route_to("192.0.2.1"))


def test_ranks_on_several_machines_listen_where_the_store_is_reached() -> None:
    place = RendezvousPoint.at(Venue(MemoryStore(), job="job", epoch=0, address="192.0.2.1"), request())
    assert place.interface({"a"}) == "127.0.0.1"
    assert place.interface({"a", "b"}) == place.interface() == address_on_route_to("192.0.2.1")
