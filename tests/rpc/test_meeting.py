"""How workers of a fixed number meet, and what all of them hear if they cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.common.process_identity import ProcessIdentity
from shoal.errors import RendezvousError, RendezvousTimeout, StoreError, UsageError
from shoal.net import Deadline
from shoal.rendezvous.point import checked_request, open_request
from shoal.rpc.connection.meeting import RankReleases, WorkerEntry, WorkerMeeting, keys_of
from shoal.store import MemoryStore, Store, TCPStore, TCPStoreServer
from tests.support.ports import free_port
from tests.support.waiting import until

PATIENCE = 20.0


def meet(url: str, rank: int, size: int, name: str, do: Callable[[WorkerMeeting], None]) -> None:
    """Meet at a place whose store rank 0 serves, and leave it as ``init_rpc`` does when that fails."""
    request = checked_request(
        url, store=None, rank=rank, size=size, timeout=PATIENCE, secret="s", host=None, job=None
    )
    with open_request(request) as place:
        do(
            WorkerMeeting(
                keys_of(place.store, "meeting", 0), ProcessIdentity.current(), name, rank, size, "shutdown"
            )
        )


def meeting_in(store: Store, rank: int, size: int) -> WorkerMeeting:
    return WorkerMeeting(store, ProcessIdentity.current(), f"w{rank}", rank, size, "shutdown")


def outcomes(*ranks: tuple[str, Callable[[WorkerMeeting], None]]) -> list[BaseException | None]:
    """How the meeting ended for each rank, which has a name and something to do."""
    url = f"tcp://127.0.0.1:{free_port()}"
    ended: list[BaseException | None] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            meet(url, rank, len(ranks), *ranks[rank])
        except BaseException as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def both(meeting: WorkerMeeting) -> None:
    meeting.gather(Deadline(PATIENCE))
    meeting.join(Deadline(PATIENCE))


def no_agent(meeting: WorkerMeeting) -> None:
    meeting.gather(Deadline(PATIENCE))
    error = UsageError("there is no such device")
    meeting.fail(error)
    raise error


def impatient(meeting: WorkerMeeting) -> None:
    until(lambda: meeting._entry_of_running(1))  # the other that comes
    meeting.gather(Deadline(0.3))


@pytest.fixture
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Rank 1 reads what the others say of themselves when this is set, and not before."""
    go, there = threading.Event(), WorkerMeeting._entry_of_running

    def wait_first(self: Any, rank: int, timeout: float = 0.0) -> Any:
        if self._rank == 1 and rank == 0:
            go.wait(PATIENCE)
        return there(self, rank, timeout)

    monkeypatch.setattr(WorkerMeeting, "_entry_of_running", wait_first)
    yield go
    go.set()


def test_all_hear_of_two_with_one_name_though_one_of_them_serves_the_store(
    slow_reader: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on = WorkerMeeting._propagate_failure

    def then_go(self: Any, reason: str) -> None:
        threading.Timer(0.05, slow_reader.set).start()
        passed_on(self, reason)

    monkeypatch.setattr(WorkerMeeting, "_propagate_failure", then_go)
    for error in outcomes(("w", both), ("w", both)):
        assert isinstance(error, UsageError), repr(error)
        assert "name='w' is not unique: ranks 0, 1 have it" in str(error)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_hear_why_one_could_not_join(failing: int) -> None:
    ended = outcomes(*((f"w{rank}", no_agent if rank == failing else both) for rank in range(3)))
    assert isinstance(ended.pop(failing), UsageError)
    for error in ended:
        assert isinstance(error, RendezvousError), repr(error)
        assert f"'w{failing}' (rank {failing}) could not join: there is no such device" in str(error)


def test_a_worker_that_ended_as_soon_as_it_had_joined_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = threading.Event()
    monkeypatch.setattr(WorkerEntry, "is_dead", lambda entry: entry.name == "w1" and died.is_set())

    def slow(meeting: WorkerMeeting) -> None:
        meeting.gather(Deadline(PATIENCE))
        meeting.announce_joined()
        assert died.wait(PATIENCE)
        meeting.join(Deadline(PATIENCE))

    def quick(meeting: WorkerMeeting) -> None:
        both(meeting)
        died.set()

    assert outcomes(("w0", slow), ("w1", quick)) == [None, None]


def test_those_that_came_hear_who_did_not_though_they_would_have_waited_longer() -> None:
    def never(meeting: WorkerMeeting) -> None:
        """Rank 2 does not come."""

    first, second, _ = outcomes(("w0", impatient), ("w1", both), ("w2", never))
    assert isinstance(first, RendezvousTimeout), repr(first)
    assert isinstance(second, RendezvousError), repr(second)
    for error in (first, second):
        assert "ranks 2 of 3 have not joined within 0.3 s" in str(error)


def test_the_process_with_the_store_waits_for_the_others_though_they_have_connected_again() -> None:
    store, order = MemoryStore(), []

    def serve() -> None:
        meeting_in(store, 0, 3).release_store(PATIENCE, lambda: False)
        order.append("closed")

    serving = threading.Thread(target=serve)
    serving.start()
    for rank in (1, 2):
        order.append(f"w{rank}")
        meeting_in(store, rank, 3).release_store(PATIENCE, None)
    serving.join()
    assert order == ["w1", "w2", "closed"]


def test_workers_wait_for_those_of_an_earlier_job_that_leave() -> None:
    store = MemoryStore()
    earlier, later = meeting_in(store, 0, 1), meeting_in(store, 0, 1)
    both(earlier)
    earlier._write_entry(joined=True, leaving=True)
    with pytest.raises(
        RendezvousTimeout,
        match=r"an earlier job in this store is ending, but its worker 'w0' \(process \d+\)",
    ):
        later.gather(Deadline(0.05))
    assert earlier._entry(0, 0.0).leaving, "the later one has not replaced the entry"
    earlier.release_store(PATIENCE, None)
    both(later)


@pytest.mark.parametrize("own", [True, False])
def test_a_store_lost_before_rank_0_has_an_entry_is_that_of_an_earlier_job(own: bool) -> None:
    with TCPStoreServer() as server, TCPStore(server.host, server.port) as store:
        ended: list[BaseException] = []
        meeting = meeting_in(store, 1, 3)

        def gather() -> None:
            try:
                meeting.gather(Deadline(PATIENCE))
            except (RendezvousError, StoreError) as error:
                ended.append(error)

        gathering = threading.Thread(target=gather)
        with store.clone() as observer:
            if own:
                meeting_in(observer, 0, 3)._write_entry()
            gathering.start()
            observer.wait(["1"], PATIENCE)
            if own:
                until(lambda: meeting._seen)
        server.close()
        gathering.join()
    (error,) = ended
    assert isinstance(error, RendezvousError if own else StoreError), repr(error)
    assert "lost the store" in str(error)


def test_a_worker_that_could_not_join_has_not_joined_when_it_releases_the_store() -> None:
    meeting = meeting_in(MemoryStore(), 0, 1)
    meeting.gather(Deadline(PATIENCE))
    meeting.fail(UsageError("there is no such device"))
    meeting.release_store(PATIENCE, None)
    entry = meeting._entry(0, 0.0)
    assert (entry.joined, entry.left) == (False, True)
    assert "there is no such device" in entry.failed


def test_a_store_is_kept_until_all_ranks_have_released_it() -> None:
    asked = [0]

    def others_disconnected() -> bool:  # they are connected: they wait for the next meeting there
        asked[0] += 1
        return False

    with TCPStoreServer() as server, TCPStore(server.host, server.port) as store, store.clone() as others:
        stores = [store, others, others]
        own, first, second = (RankReleases(stores[rank], rank, 3) for rank in range(3))
        for releases in (own, first, second):
            releases.withdraw()
        for releases in (first, second):
            releases.release(PATIENCE, None)
        first.withdraw()  # rank 1 comes again
        serving = threading.Thread(target=own.release, args=(PATIENCE, others_disconnected))
        serving.start()
        until(lambda: asked[0] > 3)
        assert serving.is_alive()
        first.release(PATIENCE, None)
        serving.join(PATIENCE / 2)
        assert not serving.is_alive()
