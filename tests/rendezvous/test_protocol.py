"""The protocol by which ranks meet in a store."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from shoal import (
    Membership,
    MemoryStore,
    PrefixStore,
    RendezvousError,
    RendezvousTimeout,
    StoreError,
    VersionMismatch,
)
from shoal.common.process_identity import ProcessIdentity, machine_id, now
from shoal.rendezvous import job_record, protocol, records, report_exit
from shoal.rendezvous.point import agree_on_secret
from shoal.rendezvous.protocol import Rendezvous
from shoal.rendezvous.rounds import LocalProcesses
from tests.support.waiting import PATIENCE, until

from .together import all_well, meet_in, release_all, together


@pytest.fixture
def store() -> Any:
    with MemoryStore(20.0) as store:
        yield store


def _meet_all(store: MemoryStore, size: int, **how: Any) -> list[Membership]:
    calls = [lambda rank=rank: meet_in(store, rank, size, **how) for rank in range(size)]
    return all_well(together(*calls))


def _write_record(store: MemoryStore, size: int, **how: Any) -> None:
    records = job_record(size, "job", **how)
    store.multi_set(list(records), list(records.values()))


def test_everybody_learns_who_they_are(store: MemoryStore) -> None:
    members = _meet_all(store, 3)
    assert [(member.rank, member.size) for member in members] == [(0, 3), (1, 3), (2, 3)]
    assert [(member.local_rank, member.local_size) for member in members] == [(0, 3), (1, 3), (2, 3)]
    assert {member.interface for member in members} == {"127.0.0.1"}
    assert len({member.host for member in members}) == 1


def test_local_ranks_follow_from_the_hosts(store: MemoryStore) -> None:
    hosts = ["a", "b", "b", "a"]
    calls = [lambda rank=rank: meet_in(store, rank, 4, host=hosts[rank]) for rank in range(4)]
    members = all_well(together(*calls))
    assert [(member.local_rank, member.local_size) for member in members] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_the_members_share_a_store_of_their_own(store: MemoryStore) -> None:
    members = _meet_all(store, 2)
    members[0].store.set("x", b"1")
    assert members[1].store.get("x") == b"1"
    assert not store.check(["x"])


def test_the_rank_that_serves_the_store_waits_for_all_but_lost_ranks(store: MemoryStore) -> None:
    asked = [0]

    def others_disconnected() -> bool:  # a stopped process stays connected
        asked[0] += 1
        return False

    calls = [
        lambda: meet_in(store, 0, 3, others_disconnected=others_disconnected),
        lambda: meet_in(store, 1, 3),
        lambda: meet_in(store, 2, 3),
    ]
    first, second, lost = all_well(together(*calls))
    first.lost.add(2)
    serving = threading.Thread(target=first.release, args=(4 * PATIENCE,))
    serving.start()
    until(lambda: asked[0] > 3)
    assert serving.is_alive()
    second.release(PATIENCE)
    serving.join(PATIENCE)
    assert not serving.is_alive()
    lost.release(1.0)


def test_ranks_are_given_out_in_order_of_arrival(store: MemoryStore) -> None:
    _write_record(store, 3)
    members = all_well(together(*[lambda: meet_in(store)] * 3))
    assert sorted(member.rank for member in members) == [0, 1, 2]
    assert {member.size for member in members} == {3}


def test_a_rank_reads_of_the_others_what_its_host_needs(store: MemoryStore) -> None:
    def member(rank: int) -> records.MemberDescription:
        host = f"host {rank // 2}"
        return records.MemberDescription(
            f"{host}/boot/net", f"pid/{rank + 100}/1", host, True, "token", at=1.0
        )

    with PrefixStore("room", store) as room:
        records.write_summary(room, [member(rank) for rank in range(64)])
        raw = room.get(records.host_key("host 3", "host 3/boot/net"))
        assert len(raw) < 350
        met = records.decode_met(raw)
        assert (met.together, len(met.machines)) == ([6, 7], 8)
        assert met.present == [records.LocalMember(rank, f"pid/{rank + 100}/1", 1.0) for rank in met.together]


def test_a_member_that_was_not_counted_is_found_nevertheless(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Rendezvous._try_claim

    def take_uncounted(meeting: Rendezvous, rank: int) -> bool:
        taken = take(meeting, rank)
        meeting._arrivals = 0  # as if each had died before its count, on another machine
        return taken

    monkeypatch.setattr(Rendezvous, "_try_claim", take_uncounted)
    assert [member.size for member in _meet_all(store, 3)] == [3] * 3


def test_another_size_is_refused_and_both_sizes_are_named(store: MemoryStore) -> None:
    first, second = together(
        lambda: meet_in(store, 0, 2, timeout=1.0), lambda: meet_in(store, 1, 3, timeout=1.0)
    )
    errors = [error for error in (first, second) if not isinstance(error, RendezvousTimeout)]
    assert len(errors) == 1
    assert isinstance(errors[0], RendezvousError)
    sizes = ("with size 3", "size is 2") if errors[0] is second else ("with size 2", "size is 3")
    assert all(size in str(errors[0]) for size in sizes)  # whoever came second is refused


def test_who_waits_is_told_who_was_refused(store: MemoryStore) -> None:
    _write_record(store, 2)
    with pytest.raises(RendezvousError, match="came with size 3, but the job's size is 2"):
        meet_in(store, 1, 3)
    with pytest.raises(RendezvousTimeout, match=r"rank 1; .* Refused meanwhile: .* came with size 3"):
        meet_in(store, 0, 2, timeout=0.05)


def test_a_rank_given_twice_is_named(store: MemoryStore) -> None:
    results = together(*(lambda: meet_in(store, 1, 2, timeout=0.3) for _ in range(2)))
    errors = [error for error in results if not isinstance(error, RendezvousTimeout)]
    assert len(errors) == 1
    assert isinstance(errors[0], RendezvousError)
    assert f"rank 1 is given twice: process {os.getpid()}" in str(errors[0])


def test_a_rank_beyond_the_recorded_size_is_refused(store: MemoryStore) -> None:
    _write_record(store, 2)
    with pytest.raises(
        RendezvousError, match="came as rank 5, but the job's size is 2: ranks go from 0 to 1"
    ):
        meet_in(store, 5)


def test_a_late_comer_to_a_full_group_is_refused(store: MemoryStore) -> None:
    _write_record(store, 2)
    all_well(together(*[lambda: meet_in(store)] * 2))
    with pytest.raises(RendezvousError, match="the group of 2 is full, this process is one too many"):
        meet_in(store)


def test_a_rank_given_out_and_named_tells_of_the_mixture(store: MemoryStore) -> None:
    _write_record(store, 2)
    waiting, refused = together(
        lambda: meet_in(store, timeout=0.5), lambda: _when_taken(store, lambda: meet_in(store, 0))
    )
    assert isinstance(waiting, RendezvousTimeout)
    assert "requested no rank" in str(refused)


def _when_taken(store: MemoryStore, call: Any) -> Any:
    store.wait(["job/0/0/rank/0"])
    return call()


def test_a_peer_of_another_version_is_refused_and_both_are_named(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(records, "build_version", lambda: "0.0.9")
        store.set("job/0/0/record", records.msgspec.json.encode(records.MeetingRecord(2, version="0.0.9")))
    with pytest.raises(VersionMismatch, match=r"runs shoal 0\.0\.9 .* this process runs"):
        meet_in(store, 0, 2)


def test_a_timeout_names_the_ranks_that_are_missing(store: MemoryStore) -> None:
    results = together(*(lambda rank=rank: meet_in(store, rank, 5, timeout=1.5) for rank in (0, 2)))
    for rank, result in zip((0, 2), results, strict=True):
        assert isinstance(result, RendezvousTimeout)
        assert f"rank {rank} of 5 waited 1.5 s for ranks " in str(result)
        assert "; ranks 1, 3, 4 did not come" in str(result)


def test_a_timeout_tells_who_gave_up_before(store: MemoryStore) -> None:
    with pytest.raises(RendezvousTimeout, match="rank 0 of 3 waited"):
        meet_in(store, 0, 3, timeout=0.05)
    with pytest.raises(RendezvousTimeout, match="ranks 0, 2; rank 2 did not come; rank 0 came and gave up"):
        meet_in(store, 1, 3, timeout=0.05)


def test_a_missing_record_is_explained(store: MemoryStore) -> None:
    with pytest.raises(RendezvousTimeout, match=r"no process wrote the job's record.*shoal store --size"):
        meet_in(store, timeout=0.05)


def test_who_timed_out_may_come_again(store: MemoryStore) -> None:
    with pytest.raises(RendezvousTimeout):
        meet_in(store, 0, 2, timeout=0.05)
    assert [member.rank for member in _meet_all(store, 2)] == [0, 1]


def test_who_timed_out_without_a_rank_may_come_again(store: MemoryStore) -> None:
    _write_record(store, 2)
    for _ in range(3):
        with pytest.raises(RendezvousTimeout):
            meet_in(store, timeout=0.05)
    members = all_well(together(*[lambda: meet_in(store)] * 2))
    assert sorted(member.rank for member in members) == [0, 1]


def test_a_foreign_value_under_our_keys_is_reported(store: MemoryStore) -> None:
    store.set("job/0/0/record", b"something else")
    with pytest.raises(StoreError, match="a MeetingRecord in the store cannot be read"):
        meet_in(store, 0, 2)
    with pytest.raises(StoreError, match="a summary in the store cannot be read"):
        records.decode_met(b"something else")


@pytest.mark.concurrency
def test_many_ranks_meet_by_arrival_and_by_name(store: MemoryStore) -> None:
    _write_record(store, 24)
    members = all_well(together(*[lambda: meet_in(store)] * 24))
    assert sorted(member.rank for member in members) == list(range(24))


# -- one job after another -------------------------------------------------------------------------


@pytest.mark.parametrize("second_size", [2, 3])
def test_a_job_may_follow_one_that_closed(store: MemoryStore, second_size: int) -> None:
    first = _meet_all(store, 2)
    first[0].store.set("x", b"stale")
    release_all(first)
    second = _meet_all(store, second_size)
    assert not second[0].store.check(["x"])


def test_the_keys_of_a_job_that_closed_are_gone(store: MemoryStore) -> None:
    for _ in range(3):
        members = _meet_all(store, 2)
        members[0].store.set("x", b"1")
        release_all(members)
    assert store.list_keys() == ["job/0/ended/2", "job/0/room"]


def test_the_record_of_the_launcher_holds_for_the_jobs_to_come(store: MemoryStore) -> None:
    _write_record(store, 2)
    for _ in range(3):
        release_all(all_well(together(*[lambda: meet_in(store)] * 2)))


@pytest.mark.concurrency
def test_ranks_that_meet_again_and_again_at_once_never_mix_two_groups(store: MemoryStore) -> None:
    def rounds(rank: int) -> list[str]:
        seen = []
        for number in range(20):
            member = meet_in(store, rank, 3)
            seen.append(member.store.compare_set("round", b"", str(number)).decode())
            member.release(10.0)
        return seen

    results = together(*(lambda rank=rank: rounds(rank) for rank in range(3)))
    assert results == [[str(number) for number in range(20)]] * 3


def test_a_fast_rank_waits_for_the_slow_ones_of_the_job_before(store: MemoryStore) -> None:
    first = _meet_all(store, 2)
    first[1].release(1.0)

    def again(rank: int) -> Membership:
        if rank == 0:
            first[0].release(1.0)
        return meet_in(store, rank, 2)

    assert len(all_well(together(lambda: again(0), lambda: again(1)))) == 2


@pytest.mark.parametrize("second_size", [2, 3])
@pytest.mark.parametrize("named", [True, False], ids=["by name", "by arrival"])
def test_the_last_member_may_leave_at_any_moment_of_a_newcomers_way(
    monkeypatch: pytest.MonkeyPatch, named: bool, second_size: int
) -> None:
    monkeypatch.setattr(protocol, "_LEAVE_POLL_INTERVAL_S", 0.01)
    for moment in range(30):
        with MemoryStore(20.0) as store, monkeypatch.context() as patch:
            _come_while_the_last_one_leaves(patch, store, moment, named, second_size)
            assert store.list_keys() == ["job/0/ended/1", "job/0/room"], moment


def _come_while_the_last_one_leaves(
    patch: pytest.MonkeyPatch, store: MemoryStore, moment: int, named: bool, second_size: int
) -> None:
    """Rank 0 of two left and comes again; rank 1 leaves before rank 0's store operation ``moment``."""
    first = _meet_all(store, 2)
    first[0].release(1.0)
    execute, left, steps = MemoryStore._execute, threading.Event(), itertools.count()
    newcomer: list[int] = []

    def stepped(self: MemoryStore, *args: Any, **how: Any) -> Any:
        if not left.is_set() and threading.get_ident() in newcomer and next(steps) == moment:
            left.set()
            first[1].release(1.0)  # the last one: it clears the room
        return execute(self, *args, **how)

    def come(rank: int) -> Membership:
        if rank == 0:
            newcomer.append(threading.get_ident())
        else:
            assert left.wait(20.0)
        return meet_in(store, rank if named else None, second_size)

    patch.setattr(MemoryStore, "_execute", stepped)
    release_all(all_well(together(*(lambda rank=rank: come(rank) for rank in range(second_size)))))


def test_a_rank_that_never_leaves_is_named(store: MemoryStore) -> None:
    first = _meet_all(store, 2)
    first[1].release(1.0)
    with pytest.raises(RendezvousTimeout, match=r"an earlier job .* its rank 0 did not leave"):
        meet_in(store, 1, 2, timeout=0.1)


def test_epochs_and_jobs_do_not_meet(store: MemoryStore) -> None:
    groups = [_meet_all(store, 2, job=job, epoch=epoch) for job in ("a", "a/0") for epoch in (0, 1)]
    for number, members in enumerate(groups):
        members[0].store.set("x", str(number))
    assert [members[1].store.get("x") for members in groups] == [b"0", b"1", b"2", b"3"]
    with pytest.raises(RendezvousError, match="rank 0 is given twice"):
        meet_in(store, 0, 2, job="a", epoch=1)


def test_a_job_may_follow_one_whose_processes_were_killed(store: MemoryStore) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for rank, pid in enumerate([process.pid, process.pid]):
        dead = ProcessIdentity.current().process.split("/")
        descriptor = records.MemberDescription(machine_id(), f"{dead[0]}/{pid}/1.5", "h", True, str(rank))
        store.set(f"job/0/0/rank/{rank}", records.msgspec.json.encode(descriptor))
    store.set("job/0/0/record", records.msgspec.json.encode(records.MeetingRecord(2)))
    assert len(_meet_all(store, 3)) == 3


def test_a_job_of_processes_elsewhere_is_not_taken_for_dead(store: MemoryStore) -> None:
    descriptor = records.MemberDescription("another/machine", "pid:[1]/1/1.5", "h", True, "t")
    store.set("job/0/0/rank/0", records.msgspec.json.encode(descriptor))
    store.set("job/0/0/record", records.msgspec.json.encode(records.MeetingRecord(2)))
    with pytest.raises(RendezvousError, match=r"rank 0 is given twice: process 1 on another .*SHOAL_JOB"):
        meet_in(store, 0, 2)


def _dead_member(
    store: MemoryStore, rank: int, size: int, machine: str = "", room: int = 0, at: float = 0.0
) -> None:
    """What a process leaves in the store that claimed its rank and was killed."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    process = f"{ProcessIdentity.current().process.split('/')[0]}/{ended.pid}/15"
    me = records.MemberDescription(machine or machine_id(), process, "h", True, f"dead {rank}", at=at)
    keys = records.round_keys(records.job_keys(store, "job", 0), room)
    keys.compare_set("record", b"", records.msgspec.json.encode(records.MeetingRecord(size)))
    keys.together([LocalProcesses(keys, me).append(rank)])
    keys.set(records.rank_key(rank), records.msgspec.json.encode(me))


def test_the_death_of_a_member_is_told_to_those_that_wait(store: MemoryStore) -> None:
    def killed() -> None:
        store.wait(["job/0/0/rank/0", "job/0/0/rank/1"])
        _dead_member(store, 3, 4)

    first, second, _ = together(lambda: meet_in(store, 0, 4), lambda: meet_in(store, 1, 4), killed)
    for error in (first, second):
        assert isinstance(error, RendezvousError)
        assert not isinstance(error, RendezvousTimeout)
        assert "rank 3 (process " in str(error)
        assert "died while the ranks were meeting" in str(error)
    release_all(_meet_all(store, 4))
    assert store.list_keys() == ["job/0/ended/1", "job/0/room"]


@pytest.mark.parametrize("named", [True, False])
def test_a_member_that_died_before_all_had_come_is_in_nobodys_way(store: MemoryStore, named: bool) -> None:
    _write_record(store, 2)
    for number in range(3):
        _dead_member(store, 0, 2, room=number)
        calls = [lambda rank=rank: meet_in(store, rank if named else None) for rank in range(2)]
        members = all_well(together(*calls))
        assert members[0].store is not members[1].store
        release_all(members)
        store.set("job/0/room", str(number + 1))
        store.delete(f"job/0/ended/{number + 1}")


def test_a_late_comer_hears_once_of_the_death_of_a_rank_that_was_started_with_it(store: MemoryStore) -> None:
    _dead_member(store, 0, 2, at=now())
    for size in (2, 2):
        with pytest.raises(RendezvousError, match=r"rank 0 \(process .* died while the ranks were meeting"):
            meet_in(store, 1, size)
        release_all(_meet_all(store, size))  # a second try waits for the others
        _dead_member(store, 0, 2, at=now(), room=int(store.get("job/0/room")))


def test_a_member_that_died_on_another_machine_is_waited_for(store: MemoryStore) -> None:
    _dead_member(store, 1, 3, machine="another/boot/net")
    with pytest.raises(RendezvousTimeout, match=r"waited .* for rank 2; rank 2 did not come"):
        meet_in(store, 0, 3, timeout=0.5)


def test_a_job_that_lost_a_rank_is_waited_for_until_the_others_are_gone(store: MemoryStore) -> None:
    first = _meet_all(store, 2)
    _dead_member(store, 1, 2)  # in the place of the member that is there
    with pytest.raises(RendezvousTimeout, match=r"an earlier job .* its rank 0 did not leave"):
        meet_in(store, 1, 2, timeout=0.2)

    def late() -> None:
        first[0].release(1.0)

    newcomers = together(lambda: meet_in(store, 0, 2), lambda: meet_in(store, 1, 2), late)
    assert len(all_well(newcomers[:2])) == 2


def test_a_rank_that_cannot_connect_tells_the_others(store: MemoryStore) -> None:
    members = _meet_all(store, 3)
    for member in members:
        member.check()
    members[1].abandon(OSError("no descriptors"))
    for member in (members[0], members[2]):
        with pytest.raises(RendezvousError, match="rank 1 could not connect: OSError: no descriptors"):
            member.check()
        member.abandon(RendezvousError("heard of it"))
    release_all(_meet_all(store, 3))
    assert store.list_keys() == ["job/0/ended/1", "job/0/room"]


def test_a_secret_agreed_in_the_store_is_the_same_for_all(store: MemoryStore) -> None:
    first, second = together(lambda: agree_on_secret(store.clone()), lambda: agree_on_secret(store.clone()))
    assert first == second
    assert isinstance(first, bytes)
    assert len(first) == 64


def test_ranks_that_wait_for_one_whose_process_ended_are_told_how_it_ended(store: MemoryStore) -> None:
    _write_record(store, 3)
    came = threading.Event()

    def wait(rank: int) -> Membership:
        came.set()
        return meet_in(store, rank, timeout=60.0)

    def launcher() -> None:
        came.wait()
        report_exit(store, 1, "exit code 0", job="job")

    *ranks, _ = together(lambda: wait(0), lambda: wait(2), launcher)
    for error in ranks:
        assert isinstance(error, RendezvousError)
        assert "rank 1 ended (exit code 0) without meeting the others" in str(error)


def test_ranks_that_come_after_the_process_of_another_ended_are_told_too(store: MemoryStore) -> None:
    _write_record(store, 2)
    report_exit(store, 1, "exit code 7", job="job")
    for _ in range(2):  # once, and when it tries again
        with pytest.raises(RendezvousError, match=r"rank 1 ended \(exit code 7\) without meeting"):
            meet_in(store, 0, timeout=60.0)


def test_an_end_after_the_ranks_met_is_no_reason_but_one_before_they_meet_again_is(
    store: MemoryStore,
) -> None:
    _write_record(store, 2)
    members = _meet_all(store, 2)
    report_exit(store, 1, "exit code 0", job="job")
    for member in members:
        member.check([])
    release_all(members)
    with pytest.raises(RendezvousError, match=r"rank 1 ended \(exit code 0\) .* as often as the others do"):
        meet_in(store, 0, timeout=60.0)
