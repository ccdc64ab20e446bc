"""An opened place: what a process has before it has met anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import ConfigurationError, MemoryStore, StoreError, UsageError
from shoal.rendezvous import Venue, open_point, rendezvous_at
from shoal.rendezvous.addresses import LOOPBACK, is_local_address
from shoal.rendezvous.point import RendezvousPoint
from shoal.rendezvous.records import ROUND

from .together import all_well, release_all, request, together


def test_a_place_is_open_to_processes_without_rank_and_size(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'place'}"
    with open_point(url, job="rpc", timeout=20) as one, open_point(url, job="rpc", timeout=20) as two:
        one.store.set("who", b"me")
        assert two.store.get("who") == b"me"
        assert one.secret() == two.secret() != b""
        assert (one.job, one.epoch) == ("rpc", 0)
        assert is_local_address(one.interface())
        assert one.interface({"this machine"}) == LOOPBACK
        with open_point(url, job="other", timeout=20) as another:
            assert not another.store.check(["who"])
            assert another.secret() != one.secret()


def test_ranks_meet_at_a_place_that_others_use_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'place'}"
    with open_point(url, timeout=20) as visitor:
        visitor.store.set("visitor", b"here")
        for room in range(2):
            places = [open_point(url, rank=rank, size=2, timeout=20) for rank in range(2)]
            assert [place.store.add(ROUND, 0) for place in places] == [room, room]
            members = all_well(together(*(lambda place=place: rendezvous_at(place) for place in places)))
            assert [member.rank for member in members] == [0, 1]
            release_all(members)
        assert visitor.store.get("visitor") == b"here"


def test_a_given_secret_is_the_places_own() -> None:
    store = MemoryStore()
    with open_point(store=store, secret="given", timeout=5) as place:
        assert place.secret() == b"given"


def test_hosts_may_have_names_that_are_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    names = ["host \udcfe", "host \udcff"]  # as in os.environ
    places = []
    for rank, name in enumerate(names):
        monkeypatch.setenv("SHOAL_HOST_ID", name)
        places.append(open_point(store=store, rank=rank, size=2, secret="given", timeout=20))
    members = all_well(together(*(lambda place=place: rendezvous_at(place) for place in places)))
    assert [member.host for member in members] == ["host \\udcfe", "host \\udcff"]
    release_all(members)


def test_a_place_beyond_this_host_has_no_secret_of_itself() -> None:
    venue = Venue(MemoryStore(), job="job", epoch=0, address="192.0.2.1")
    with (
        RendezvousPoint.at(venue, request()) as place,
        pytest.raises(ConfigurationError, match=r"192\.0\.2\.1.*the job has no secret"),
    ):
        place.secret()


def test_a_job_that_cannot_be_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as a job's name"):
        open_point(f"file://{tmp_path / 'place'}", job="")
    assert not (tmp_path / "place").exists()


def test_of_a_brief_meeting_only_the_groups_own_keys_stay() -> None:
    store = MemoryStore()
    venues = [Venue(store.clone(), rank, 2, job="job", epoch=0, leaves_store_early=True) for rank in range(2)]
    calls = [lambda venue=venue: rendezvous_at(RendezvousPoint.at(venue, request())) for venue in venues]
    members = all_well(together(*calls))
    members[0].store.set("key", b"value")
    together(*(member.connected for member in members))
    assert members[1].store.get("key") == b"value"
    own = [key for key in store.list_keys() if not key.startswith("job/0/")]
    assert len(own) == 1
    assert own[0].endswith("key")
    assert store.list_keys("job/0/") == ["job/0/ended/0", "job/0/room"]
    release_all(members)
    store.set("still", b"open")


def test_who_cannot_connect_after_a_brief_meeting_closes_the_groups_own_keys_too() -> None:
    store = MemoryStore()
    member = rendezvous_at(
        RendezvousPoint.at(
            Venue(store.clone(), 0, 1, job="job", epoch=0, leaves_store_early=True), request(0, 1)
        )
    )
    member.abandon(OSError("no network"))
    with pytest.raises(StoreError, match="closed"):
        member.store.num_keys()
