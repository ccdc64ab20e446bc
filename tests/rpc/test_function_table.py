"""The numbers of functions on a connection: few at a time, for any number of functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal.errors import RpcError
from shoal.rpc import Agent
from shoal.rpc.calls.call import FUNCTION, NUMBER_CONFIRMED
from shoal.rpc.codec.pickled import encode
from shoal.rpc.connection import function_table
from shoal.rpc.connection.function_table import NO_NUMBER, ReceivedFunctions, SentFunctions
from shoal.testing import Agents
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE

MAX_FUNCTIONS = 8
FUNCTIONS = 10_000


def functions(count: int) -> list[Callable[[], int]]:
    """Functions of this module that others find by their names, ``f0`` and so on."""
    usable = []
    for i in range(count):
        if f"f{i}" not in globals():
            exec(f"def f{i}(): return {i}", globals())
        usable.append(globals()[f"f{i}"])
    return usable


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of few places."""
    monkeypatch.setattr(function_table, "MAX_FUNCTIONS", MAX_FUNCTIONS)
    monkeypatch.setattr(function_table, "_SLOTS_FREED_AT_ONCE", 2)
    monkeypatch.setattr(function_table, "_MAX_POSTED", MAX_FUNCTIONS // 2)
    monkeypatch.setattr(function_table, "_MIN_ORDERED", MAX_FUNCTIONS // 2)


class Ends:
    """Both ends of a connection, without the connection."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.sent = SentFunctions(lambda: self.pending)
        self.received = ReceivedFunctions()

    def call(self, fn: Callable[..., Any]) -> tuple[int, bool]:
        """A call that is pending."""
        number, confirmed, ticket = self.sent.use(fn)
        self.pending.append(number)
        self.sent.release(ticket)
        return number, confirmed

    def serve(self, fn: Callable[..., Any], number: int, confirmed: bool) -> None:
        """The callee takes up a call and replies."""
        if not confirmed and number != NO_NUMBER:
            self.received.learn(number, fn)
        if confirmed:
            assert self.received.function(number) is fn
        self.pending.remove(number)
        if number != NO_NUMBER:
            self.sent.confirm(number)

    def both(self, fn: Callable[..., Any]) -> int:
        number, confirmed = self.call(fn)
        self.serve(fn, number, confirmed)
        return number


@pytest.mark.usefixtures("small")
def test_functions_that_are_called_go_by_number_however_many_there_were() -> None:
    ends = Ends()
    for fn in functions(100):
        assert ends.both(fn) != NO_NUMBER
        number, confirmed = ends.call(fn)
        assert confirmed
        ends.serve(fn, number, confirmed)
    assert len(ends.sent._entries) <= MAX_FUNCTIONS
    assert len(ends.received._slots) <= MAX_FUNCTIONS


@pytest.mark.usefixtures("small")
def test_the_function_that_was_not_called_for_the_longest_time_goes_first() -> None:
    ends = Ends()
    often, *others = functions(100)
    first = ends.both(often)
    for fn in others:
        ends.both(fn)
        assert ends.both(often) == first


@pytest.mark.usefixtures("small")
def test_a_call_that_is_queued_finds_its_function_whatever_is_called_meanwhile() -> None:
    ends = Ends()
    queued = functions(3)
    for fn in queued:
        ends.both(fn)
    calls = [(fn, *ends.call(fn)) for fn in queued]
    for fn in functions(100)[3:]:
        ends.both(fn)
    for fn, number, confirmed in calls:
        assert confirmed
        ends.serve(fn, number, confirmed)


@pytest.mark.usefixtures("small")
def test_functions_go_by_reference_while_no_place_can_be_given_away() -> None:
    ends = Ends()
    calls = [(fn, *ends.call(fn)) for fn in functions(MAX_FUNCTIONS)]
    assert ends.call(functions(MAX_FUNCTIONS + 1)[-1]) == (NO_NUMBER, False)
    ends.pending.remove(NO_NUMBER)
    for fn, number, confirmed in calls:
        ends.serve(fn, number, confirmed)
    assert ends.both(functions(MAX_FUNCTIONS + 1)[-1]) != NO_NUMBER


@pytest.mark.usefixtures("small")
def test_a_number_that_is_being_used_is_not_given_away() -> None:
    ends = Ends()
    fn, *others = functions(100)
    ends.both(fn)
    number, confirmed, ticket = ends.sent.use(fn)  # and the call is encoded, which may take long
    for each in others:
        ends.both(each)
    assert confirmed
    assert ends.received.function(number) is fn
    ends.sent.release(ticket)
    for each in others:
        ends.both(each)
    assert ends.both(fn) != number


@pytest.mark.usefixtures("small")
def test_a_posted_function_keeps_its_number_for_nobody_says_when_it_was_taken_up() -> None:
    ends = Ends()
    few, others = functions(MAX_FUNCTIONS), functions(100)[MAX_FUNCTIONS:]
    for fn in few:
        ends.both(fn)
    posted = [ends.sent.use(fn, post=True) for fn in few]
    assert [number for number, _, _ in posted].count(NO_NUMBER) == MAX_FUNCTIONS // 2
    for _, _, ticket in posted:
        ends.sent.release(ticket)
    assert ends.sent.use(others[0], post=True) == (NO_NUMBER, False, 0), "the other end does not know it"
    for fn in others:
        assert ends.both(fn) != NO_NUMBER
    for fn, (number, confirmed, _) in zip(few, posted, strict=True):
        if confirmed:
            assert ends.received.function(number) is fn
    assert not ends.sent._making


@pytest.mark.usefixtures("small")
def test_threads_agree_with_the_other_end_whoever_makes_room() -> None:
    ends, wrong = Ends(), []
    lock, there = threading.Lock(), functions(4 * MAX_FUNCTIONS)

    def work(seed: int) -> None:
        try:
            for i in range(3000):
                fn = there[(seed * 7 + i * i) % len(there)]
                number, confirmed, ticket = ends.sent.use(fn)
                with lock:
                    ends.pending.append(number)
                ends.sent.release(ticket)
                with lock:
                    ends.serve(fn, number, confirmed)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not ends.sent._making


def test_a_peer_that_uses_numbers_as_it_likes_fills_no_more_than_the_table() -> None:
    received = ReceivedFunctions()
    for number in [*range(0, 100 * function_table.MAX_FUNCTIONS, 7), NO_NUMBER - 1, 2**31, 5, 5, 5]:
        received.learn(number, int)
    assert len(received._slots) <= function_table.MAX_FUNCTIONS
    received.learn(function_table.MAX_FUNCTIONS, str)
    received.learn(0, float)  # an old number does not come back
    assert received.function(NO_NUMBER - 1) is int
    for number in (0, 3, 2**32 - 2 - function_table.MAX_FUNCTIONS):
        with pytest.raises(RpcError, match=f"number {number}, which is unknown here"):
            received.function(number)


def test_a_number_that_ran_out_is_none() -> None:
    ends = Ends()
    for slot in range(function_table.MAX_FUNCTIONS):
        ends.sent._slots.append(None)
        ends.sent._free.append(NO_NUMBER + slot)
    assert ends.call(int) == (NO_NUMBER, False)


# -- over a connection --------------------------------------------------------------------------------


def test_ten_thousand_functions_are_called_over_one_connection(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", timeout=PATIENCE)
    peer, there = a.peer("b"), functions(FUNCTIONS)
    for begin in range(0, FUNCTIONS, 500):
        for _ in range(2):
            futures = [peer.call(fn) for fn in there[begin : begin + 500]]
            assert [future.wait() for future in futures] == list(range(begin, begin + 500))
    sent = a.connection("b", PATIENCE).sent_functions
    assert len(sent._entries) <= function_table.MAX_FUNCTIONS
    assert not sent._making
    number, confirmed, ticket = sent.use(there[-1])
    sent.release(ticket)
    assert confirmed
    assert number >= function_table.MAX_FUNCTIONS
    (connection,) = b.connections.connections_of("a")
    assert len(connection.received_functions._slots) <= function_table.MAX_FUNCTIONS


@pytest.mark.usefixtures("small")
def test_functions_change_places_while_calls_wait_and_connections_break(meeting: Agents, a: Agent) -> None:
    meeting.join("b", timeout=PATIENCE, handlers=2)
    peer, there = a.peer("b"), functions(50)
    for turn in range(6):
        waiting = [peer.call(handlers.wait_for, f"turn {turn}") for _ in range(2)]
        queued = [peer.call(fn) for fn in there[:5]]  # behind those that hold all threads
        later = [peer.call(fn) for fn in there]
        handlers.note(f"turn {turn}")
        assert [future.wait() for future in queued] == list(range(5))
        assert [future.wait() for future in later] == list(range(50))
        assert all(future.wait() for future in waiting)
        if turn % 2:
            meeting.cut("a", "b")


def test_a_call_with_a_number_that_was_never_told_runs_nothing(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", timeout=PATIENCE)
    a.peer("b").call(int).wait()
    connection = a.connection("b", PATIENCE)
    encoded = encode(((), {}), connection, "a call")
    replies = []
    for number in (function_table.MAX_FUNCTIONS - 1, function_table.MAX_FUNCTIONS, NO_NUMBER, NO_NUMBER - 1):
        head = FUNCTION.pack(number, 0) + encoded.head
        call = a.endpoint.post.request(connection.number, 0, head, [], None, PATIENCE)
        assert call.wait(PATIENCE)
        message = call.reply()
        assert not message.flags & NUMBER_CONFIRMED
        replies.append((message.failed, b"is unknown here" in message.head))
    assert replies == [(True, True)] * 4
    assert a.peer("b").call(int, "7").wait() == 7
    assert b.stats()["handled"] == 0
