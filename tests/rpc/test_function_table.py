"""The numbers of functions on a connection, and the functions beyond those."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shoal.rpc import Agent
from shoal.rpc.calls.call import FUNCTION, NUMBER_CONFIRMED
from shoal.rpc.codec.pickled import encode
from shoal.rpc.connection import function_table
from shoal.rpc.connection.function_table import NO_NUMBER, SentFunctions
from shoal.testing import Agents
from tests.rpc.handlers import PATIENCE

MAX_FUNCTIONS = 8


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


@pytest.mark.usefixtures("small")
def test_functions_beyond_the_table_get_no_number() -> None:
    sent = SentFunctions()
    numbers = [sent.number_of(fn) for fn in functions(MAX_FUNCTIONS + 2)]
    assert numbers == [(number, False) for number in [*range(MAX_FUNCTIONS), NO_NUMBER, NO_NUMBER]]
    sent.confirm(3)
    assert sent.number_of(functions(4)[3]) == (3, True)
    assert sent.number_of(functions(5)[4]) == (4, False)


def test_a_post_goes_by_a_number_only_when_the_other_end_knows_it() -> None:
    sent = SentFunctions()
    assert sent.number_of(int, post=True) == (NO_NUMBER, False)
    assert sent.number_of(int) == (0, False)
    assert sent.number_of(int, post=True) == (NO_NUMBER, False)
    sent.confirm(0)
    assert sent.number_of(int, post=True) == (0, True)


@pytest.mark.usefixtures("small")
def test_threads_agree_on_the_number_of_each_function() -> None:
    sent, there = SentFunctions(), functions(4 * MAX_FUNCTIONS)
    found: list[list[int]] = []
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait()
        found.append([sent.number_of(fn)[0] for fn in there])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in zip(*found, strict=True):
        assert len({*each}) == 1
    numbered = [number for number in found[0] if number != NO_NUMBER]
    assert sorted(numbered) == list(range(MAX_FUNCTIONS))


# -- over a connection --------------------------------------------------------------------------------


def test_five_thousand_functions_are_called_over_one_connection(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", timeout=PATIENCE)
    peer, there = a.peer("b"), functions(function_table.MAX_FUNCTIONS + 1000)
    for begin in range(0, len(there), 500):
        for _ in range(2):
            some = there[begin : begin + 500]
            futures = [peer.call(fn) for fn in some]
            assert [future.wait() for future in futures] == list(range(begin, begin + len(some)))
    sent = a.connection("b", PATIENCE).sent_functions
    assert sent.number_of(there[0])[1]
    assert sent.number_of(there[-1]) == (NO_NUMBER, False)
    (connection,) = b.connections.connections_of("a")
    assert len(connection.received_functions) == function_table.MAX_FUNCTIONS


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
