"""The lobby holds junk: it is passed over, and processes go on to join."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shoal import MemoryStore, RendezvousTimeout, ShoalError
from shoal.common.process_identity import ProcessIdentity
from shoal.elastic.membership import candidates
from shoal.elastic.membership.candidates import (
    AGAIN,
    SESSION,
    CandidateRegistry,
    Invitation,
    SessionRecord,
    ValueDecoder,
)
from shoal.net import Deadline
from shoal.rendezvous import RendezvousPoint, open_point, rendezvous_again_at
from shoal.rendezvous.records import LOBBY, WANTED, MeetingRecord, MemberDescription
from shoal.store import PrefixStore, Store
from shoal.testing import no_leaks
from tests.support.junk import junk

PATIENCE = 30.0
BATCHES, PIECES = 10, 60
INVITATION = Invitation("m", 2, 3, 0, "world", 60.0, 1, "auto", "native", {"transport": "tcp"}, 5.0)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[RendezvousPoint]:
    monkeypatch.setattr(candidates, "POLL_TIMEOUT_S", 0.01)
    with no_leaks(), open_point(store=MemoryStore(), size=1, rank=0) as place:
        yield place


def came(place: RendezvousPoint, number: int) -> tuple[threading.Thread, list[Invitation]]:
    """A process that waits; with a name of its own, as all of them are this one."""
    found: list[Invitation] = []
    namespace, pid, start = place.identity.process.split("/")
    other = dataclasses.replace(
        place, identity=ProcessIdentity(f"elsewhere {number}", f"{namespace}/{pid}/{start}{number}")
    )
    joining = candidates.InvitationWaiter(other, Deadline(PATIENCE))
    thread = threading.Thread(target=lambda: found.append(joining.await_invitation()), daemon=True)
    thread.start()
    return thread, found


def invited(of_ranks: CandidateRegistry, place: RendezvousPoint, number: int) -> int:
    """Let a process come, and invite all that wait; how many there were."""
    thread, found = came(place, number)
    until = time.monotonic() + PATIENCE
    count = 0
    while thread.is_alive() and time.monotonic() < until:
        count += of_ranks.invite(10, lambda index, of: INVITATION)
        thread.join(0.002)
    assert found == [INVITATION]
    return count


def pieces(seed: int, ident: str, wanted: int) -> Iterator[tuple[str, bytes]]:
    """Keys, and what is none of what stands there."""
    choose, reader = random.Random(seed), ValueDecoder()
    decode_candidate = functools.partial(reader.decode, "candidate", kind=ProcessIdentity)
    candidate = msgspec.to_builtins(ProcessIdentity("m", "pid:[1]/1/1"))
    session = msgspec.to_builtins(SessionRecord(ident))
    for _ in range(PIECES):
        number = choose.choice(("x", "-1", "007", "", "1/2", "9" * 30, str(choose.randrange(1000, 2000))))
        key, value, read = choose.choice(
            (
                (SESSION, session, lambda raw: reader.decode(SESSION, raw, SessionRecord)),
                (WANTED, wanted, lambda raw: reader.decode(WANTED, raw, candidates.Count)),
                (f"{ident}/arrivals", 7, lambda raw: reader.number("", raw)),
                (f"{ident}/candidate/{number}", candidate, decode_candidate),
            )
        )
        raw = junk(choose, value)
        while read(raw) is not None:
            raw = junk(choose, value)
        yield key, raw


def test_junk_in_the_lobby_keeps_nobody_out(place: RendezvousPoint, caplog: pytest.LogCaptureFixture) -> None:
    of_ranks, keys = CandidateRegistry(place, 5), PrefixStore(LOBBY, place.store)
    of_ranks.open()
    of_ranks.start()
    logging.getLogger("shoal").propagate = True
    try:
        for batch in range(BATCHES):
            caplog.clear()
            for key, raw in pieces(batch, f"{of_ranks.ident:016x}", 5):
                keys.set(key, raw)
            dead = ProcessIdentity(
                place.identity.machine, f"{place.identity.process.split('/')[0]}/999999999/1"
            )
            keys.set(f"{of_ranks.ident:016x}/candidate/{2000 + batch}", msgspec.json.encode(dead))
            assert invited(of_ranks, place, batch) == 1
            assert of_ranks.waiting == 0
            assert of_ranks.wanted == 5
            warned = [
                each.getMessage() for each in caplog.records if "no process can join" in each.getMessage()
            ]
            assert warned == []
        before = threading.active_count()
    finally:
        of_ranks.close(over=True)
    assert threading.active_count() == before - 1  # the thread was there to the end


def test_each_kind_of_junk_is_told_once(place: RendezvousPoint, caplog: pytest.LogCaptureFixture) -> None:
    reader = ValueDecoder()
    for _ in range(3):
        assert reader.decode(SESSION, b"?", SessionRecord) is None
        assert reader.decode("candidate", b"[" * 100_000, ProcessIdentity) is None
        assert reader.number("arrivals", b"-1") is None
    told = [each.getMessage() for each in caplog.records]
    assert [message.split(" in the store")[0] for message in told] == [
        f"the session ignores a value of '{what}'" for what in ("session", "candidate", "arrivals")
    ]


def test_answers_that_are_none_are_passed_over(place: RendezvousPoint) -> None:
    of_ranks, keys, choose, reader = (
        CandidateRegistry(place),
        PrefixStore(LOBBY, place.store),
        random.Random(1),
        ValueDecoder(),
    )
    of_ranks.open()
    ident, value = f"{of_ranks.ident:016x}", msgspec.to_builtins(INVITATION)
    for number in range(BATCHES * PIECES):
        raw = junk(choose, value)
        while raw and reader.decode("go", raw, Invitation) is not None:
            raw = junk(choose, value)
        keys.set(f"{ident}/go/{number}", choose.choice((raw, raw, AGAIN)))
    of_ranks.start()
    try:
        assert invited(of_ranks, place, 0) == 1
    finally:
        of_ranks.close(over=False)
    assert keys.get(f"{ident}/arrivals", 0.0) == str(BATCHES * PIECES + 1).encode()


def test_a_session_that_is_over_is_heard_of_without_an_answer(place: RendezvousPoint) -> None:
    PrefixStore(LOBBY, place.store).set(SESSION, msgspec.json.encode(SessionRecord("0" * 16, over=True)))
    with pytest.raises(SystemExit) as caught:
        candidates.InvitationWaiter(place, Deadline(PATIENCE)).await_invitation()
    assert caught.value.code == 0


def test_a_session_that_never_comes_is_an_error_also_where_junk_stands(place: RendezvousPoint) -> None:
    PrefixStore(LOBBY, place.store).set(SESSION, b"?")
    with pytest.raises(RendezvousTimeout, match=r"within 0\.2 s no session began here"):
        candidates.InvitationWaiter(place, Deadline(0.2)).await_invitation()


def test_junk_in_a_meeting_fails_it_as_any_failure(place: RendezvousPoint) -> None:
    """Whatever stands in the keys of a meeting, its ranks get errors that the growth of a session expects."""
    choose = random.Random(2)
    me = MemberDescription(place.identity.machine, place.identity.process, "h", True, "token")
    values: dict[str, Any] = {
        "room": 0, "ended/0": {"reason": "r", "machine": "m", "at": 1.0, "ident": "i"}, "0/left": 1,
        "0/record": msgspec.to_builtins(MeetingRecord(2)), "0/rank/1": msgspec.to_builtins(me),
        "0/rank/x": msgspec.to_builtins(me),
        "exits": {"rank": 1, "how": "exit code 1"}, "0/arrivals": 1, "0/gave_up/x": 1,
    }  # fmt: skip
    for number in range(BATCHES * PIECES // 2):
        store: Store = PrefixStore(f"meeting {number}/default/0", place.store)
        for key in choose.sample(list(values), choose.randint(1, 3)):
            right = choose.random() < 0.3
            store.set(key, msgspec.json.encode(values[key]) if right else junk(choose, values[key]))
        with contextlib.suppress(ShoalError):  # any other error would end the training
            rendezvous_again_at(place, f"meeting {number}", rank=0, size=2, timeout=0.002).release(0.0)
