"""Processes that start alike (SHOAL_JOIN=auto): the first one begins the session, the others join it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from shoal import MemoryStore, ProcessGroup, StateLost, UsageError, ZeroRedundancyOptimizer
from shoal.elastic import Samples, Session, State, Step
from shoal.elastic.membership import candidates
from shoal.elastic.membership.candidates import (
    SESSION,
    CandidateRegistry,
    InvitationWaiter,
    SessionRecord,
    StartedSession,
    candidate_key,
    heartbeat_key,
    open_keys,
)
from shoal.net import Deadline
from shoal.rendezvous import RendezvousPoint, open_point
from shoal.store import Store
from shoal.testing import Ranks, no_leaks, processes
from tests.support.waiting import until

from .training import STEPS, Log, assert_as_undisturbed, train

PATIENCE = 60.0
#: for processes that load much of torch when they make an optimiser
LONG = 4 * PATIENCE
#: what is there for long enough to be seen, and what is not
HEARTBEAT_TIMEOUT_S = 0.3


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[RendezvousPoint]:
    monkeypatch.setattr(candidates, "HEARTBEAT_TIMEOUT_S", HEARTBEAT_TIMEOUT_S)
    monkeypatch.setattr(candidates, "MAX_RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(candidates, "POLL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(candidates, "HEARTBEAT_INTERVAL_S", 0.01)
    with no_leaks(), open_point(store=MemoryStore(), size=1, rank=0) as place:
        yield place


def note(ident: str, *, over: bool = False) -> bytes:
    return msgspec.json.encode(SessionRecord(ident, over))


def comes(place: RendezvousPoint, timeout: float = PATIENCE, *, may_start: bool = True) -> Any:
    """What a process is told that may begin the session, or that only joins one."""
    try:
        return InvitationWaiter(place, Deadline(timeout), may_start).await_invitation()
    except (StateLost, SystemExit) as error:
        return error


class Waits(threading.Thread):
    """A process that has come, and :func:`comes` to know something later."""

    def __init__(self, place: RendezvousPoint, store: Store, ident: str) -> None:
        super().__init__(daemon=True)
        self._place, self.found = place, None
        self.start()
        until(lambda: any(key.startswith(f"{ident}/candidate") for key in store.list_keys()))

    def run(self) -> None:
        self.found = comes(self._place)

    def end(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.found


def test_the_first_of_many_begins_the_session_and_no_other_does(
    place: RendezvousPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "HEARTBEAT_TIMEOUT_S", PATIENCE)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(comes(place)), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: found)
    with open_keys(place) as store:
        session = msgspec.json.decode(store.get(SESSION, 0.0), type=SessionRecord)
        assert found == [StartedSession(int(session.ident, 16))]
        until(lambda: len(store.list_keys(candidate_key(session.ident))) == 7)
        store.set(SESSION, note(session.ident, over=True))  # the others have waited for it
    for thread in threads:
        thread.join(PATIENCE)
    assert [type(each) for each in found[1:]] == [SystemExit] * 7


@pytest.mark.parametrize("before", [note("0" * 16), b"junk"], ids=["a session", "junk"])
def test_a_session_that_was_silent_from_the_start_is_succeeded(place: RendezvousPoint, before: bytes) -> None:
    with open_keys(place) as store:
        store.set(SESSION, before)
        store.set(heartbeat_key("0" * 16), b"the last")
        began = time.monotonic()
        found = comes(place)
        assert isinstance(found, StartedSession)
        assert time.monotonic() - began >= HEARTBEAT_TIMEOUT_S
        assert store.get(SESSION, 0.0) == note(f"{found.ident:016x}")
        assert store.check([heartbeat_key("0" * 16)]) == (before == b"junk")


def test_a_session_that_is_over_is_succeeded_at_once_but_by_nobody_who_waited_for_it(
    place: RendezvousPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "HEARTBEAT_TIMEOUT_S", PATIENCE)
    with open_keys(place) as store:
        store.set(SESSION, note("1" * 16))
        thread = Waits(place, store, "1" * 16)
        store.set(SESSION, note("1" * 16, over=True))
        ended = thread.end()
        assert isinstance(ended, SystemExit)
        assert ended.code == 0
        assert isinstance(comes(place), StartedSession)


def test_who_has_waited_for_a_session_that_fell_silent_has_no_newest_checkpoint(
    place: RendezvousPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "HEARTBEAT_TIMEOUT_S", 2.0)
    of_ranks = CandidateRegistry(place)
    of_ranks.open()
    of_ranks.start()
    ident = f"{of_ranks.ident:016x}"
    with open_keys(place) as store:
        thread = Waits(place, store, ident)
        until(lambda: store.check([heartbeat_key(ident)]))
        lives = time.monotonic() + 1.5 * candidates.HEARTBEAT_TIMEOUT_S
        until(lambda: time.monotonic() > lives)  # nobody gives up a session that lives
        assert thread.is_alive()
        of_ranks.close(over=False)  # as far as the store knows, its ranks have died
        found = thread.end()
    assert isinstance(found, StateLost)
    assert "has given no sign of life for" in str(found)


def test_a_session_whose_ranks_have_died_is_not_waited_for(place: RendezvousPoint) -> None:
    with open_keys(place) as store:
        store.set(SESSION, note("1" * 16))
        store.set(heartbeat_key("1" * 16), b"the last")
        timeout, began = 2 * HEARTBEAT_TIMEOUT_S, time.monotonic()
        found = comes(place, timeout, may_start=False)
        assert isinstance(found, StateLost)
        assert time.monotonic() - began >= timeout
        assert "(SHOAL_JOIN=1) waited for has given no sign of life for 0.6 s.  Start all ranks" in str(found)


def test_a_store_that_is_gone_is_no_silence_of_the_session(place: RendezvousPoint) -> None:
    joining = InvitationWaiter(place, Deadline(PATIENCE), True)
    with open_keys(place) as store:
        store.set(SESSION, note("2" * 16))
        assert joining.poll(store) is None
        joining._since -= 2 * HEARTBEAT_TIMEOUT_S
        joining.reset_heartbeat()
        assert joining.poll(store) is None
        joining._since -= 2 * HEARTBEAT_TIMEOUT_S
        assert isinstance(joining.poll(store), StartedSession)


def test_who_knew_a_session_begins_none_in_a_store_that_is_empty(
    place: RendezvousPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "HEARTBEAT_TIMEOUT_S", 2.0)
    with open_keys(place) as store:
        store.set(SESSION, note("3" * 16))
        thread = Waits(place, store, "3" * 16)
        began = time.monotonic()
        store.delete_prefix("")
        found = thread.end()
        assert isinstance(found, StateLost)
        assert time.monotonic() - began >= candidates.HEARTBEAT_TIMEOUT_S
        assert not store.check([SESSION])


def test_a_session_that_comes_back_to_an_empty_store_comes_before_a_process_that_could_begin(
    place: RendezvousPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "MAX_RETRY_DELAY_S", 1000.0)  # which a session takes to come back at most
    joining = InvitationWaiter(place, Deadline(PATIENCE), True)
    with open_keys(place) as store:
        for _ in range(3):
            assert joining.poll(store) is None
        store.set(SESSION, note("4" * 16))
        assert joining.poll(store) is None
        assert joining._ident == "4" * 16


def test_who_was_invited_in_vain_remembers_the_session(place: RendezvousPoint) -> None:
    joining = InvitationWaiter(place, Deadline(PATIENCE), True)
    with open_keys(place) as store:
        store.set(SESSION, note("5" * 16))
        assert joining.poll(store) is None
        store.set(SESSION, note("5" * 16, over=True))
    with pytest.raises(SystemExit):
        joining.await_invitation()


def test_a_session_that_ended_before_its_first_step_is_succeeded_by_those_who_waited(
    place: RendezvousPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "HEARTBEAT_TIMEOUT_S", PATIENCE)
    of_beginner = CandidateRegistry(place)
    of_beginner.open()
    of_beginner.start()
    ident = f"{of_beginner.ident:016x}"
    with open_keys(place) as store:
        thread = Waits(place, store, ident)
        until(lambda: of_beginner.waiting == 1)
        of_beginner.close(over=False, void=True)
        found = thread.end()
        assert isinstance(found, StartedSession)
        assert store.get(SESSION, 0.0) == note(f"{found.ident:016x}")


def test_the_end_of_a_session_says_nothing_of_another_one(place: RendezvousPoint) -> None:
    of_ranks = CandidateRegistry(place)
    of_ranks.open()
    of_ranks.start()
    with open_keys(place) as store:
        store.set(SESSION, note("6" * 16))
        of_ranks.close(over=True)
        assert store.get(SESSION, 0.0) == note("6" * 16)


# -- real processes --------------------------------------------------------------------------------


def bystander(group: ProcessGroup) -> None:
    """Has the store served."""
    group.store.wait(["enough"], LONG)


def alike(ranks: Ranks, *args: Any) -> int:
    return ranks.newcomer(trains, *args, SHOAL_JOIN="auto")


def trains(least: int, max_count: int | None = None, dies_at: int = -1) -> Log:
    if dies_at >= 0:
        candidates.HEARTBEAT_TIMEOUT_S, candidates.HEARTBEAT_INTERVAL_S = 8.0, 0.1

    def visit(point: str, step: Step) -> None:
        if (point, step.number) == ("before commit", dies_at):
            until(lambda: step._session.group.rank or step._session.waiting, patience=LONG)
            if step._session.group.rank == 0:  # it gives a sign of life to the one that has come
                of_ranks = step._session._members._admission._registry
                with open_keys(of_ranks._place) as store:
                    key = heartbeat_key(of_ranks._name)
                    last = store.get(key, 0.0)
                    until(lambda: store.get(key, 0.0) != last, patience=LONG)
            os.kill(os.getpid(), signal.SIGKILL)

    return train(None, visit, min=least, max=max_count)


def test_processes_that_start_alike_train_together_from_the_first_step() -> None:
    with no_leaks(), processes(bystander, 1, timeout=LONG) as ranks:
        for _ in range(3):
            alike(ranks, 3)
        ranks.store.set("enough", b"")
        _, *outcomes = ranks.join()
    assert all(each.ok for each in outcomes), [each.describe() for each in outcomes]
    logs = [each.value for each in outcomes]
    assert_as_undisturbed(logs)
    assert {(len(log.steps), step.size) for log in logs for step in log.steps} == {(STEPS, 3)}


def test_when_all_ranks_have_died_those_that_come_next_begin_anew() -> None:
    with no_leaks(), processes(bystander, 1, timeout=LONG) as ranks:
        for _ in range(2):
            alike(ranks, 2, 2, 3)
        alike(ranks, 2, 2, 3)  # no room: waits until the two have died
        outcomes = ranks_ended(ranks, 4)
        last = alike(ranks, 1, None, STEPS)
        ranks.store.set("enough", b"")
        *_, successor = ranks.join()
    assert last == 4
    ended = sorted(each.exitcode or 0 for each in outcomes[1:4])
    assert ended == [-9, -9, 0]
    (waited,) = (each for each in outcomes[1:4] if each.exitcode != -9)
    assert "StateLost" in waited.describe()
    assert successor.ok, successor.describe()
    assert [step.number for step in successor.value.steps] == list(range(STEPS))


def ranks_ended(ranks: Ranks, count: int) -> list[Any]:
    until(lambda: all(not child.process.is_alive() for child in ranks._ranks[1:count]), patience=LONG)
    return [child.outcome(number) if number else None for number, child in enumerate(ranks._ranks)]


def with_a_distributed_optimizer() -> str:
    net = nn.Linear(6, 1)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, copies=2)
    with pytest.raises(UsageError) as caught, Session(State(model=net, optimizer=optimizer)):
        pass
    return str(caught.value)


def too_many_for_the_batch() -> str:
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = State(model=net, optimizer=optimizer, samples=Samples(50, batch=2))
    with pytest.raises(UsageError) as caught, Session(state, min_size=4) as session:
        next(iter(session.steps()))
    return str(caught.value)


def test_sessions_that_nobody_can_begin_alone_are_refused() -> None:
    with no_leaks(), processes(bystander, 1, timeout=LONG) as ranks:
        ranks.newcomer(with_a_distributed_optimizer, SHOAL_JOIN="auto")
        ranks.newcomer(too_many_for_the_batch, SHOAL_JOIN="auto")
        ranks.store.set("enough", b"")
        _, refused, too_many = ranks.join()
    assert refused.ok, refused.describe()
    assert too_many.ok, too_many.describe()
    assert "4" in too_many.value
    assert "start the first ranks with SHOAL_RANK and SHOAL_SIZE, and the others with SHOAL_JOIN=1" in (
        refused.value
    )
