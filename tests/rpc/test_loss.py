"""Workers that die, leave, come again, or are cut off."""

from __future__ import annotations

import os
import queue
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal import net as wire
from shoal.errors import (
    AgentClosed,
    RemoteError,
    RpcError,
    UnknownWorker,
    UsageError,
    WireError,
    WorkerLost,
)
from shoal.rpc import Agent, Peer
from shoal.rpc import agent as agent_module
from shoal.rpc.connection.endpoint import CallEnd
from shoal.testing import Agents, no_leaks
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.support.waiting import until

FAR = {"host_id": "elsewhere"}


def blocked(peer: Peer, key: str) -> Any:
    """The future of a call that runs there, and would for long."""
    future = peer.call(handlers.wait_for, key)
    peer.call(handlers.pid).wait()
    return future


def blocked_only(peer: Peer, key: str) -> Any:
    """The same at a worker that runs one handler at a time."""
    future = peer.call(handlers.blocked, key)
    handlers.wait_for(f"{key} runs")
    return future


def test_a_lost_worker_with_connections_both_ways_is_reported_once(meeting: Agents, a: Agent) -> None:
    reports: queue.SimpleQueue[str] = queue.SimpleQueue()
    a.on_lost(reports.put)
    for n in range(5):
        meeting.start(f"b{n}")
        b = a.peer(f"b{n}")
        b.call(handlers.countdown, 1, "a", f"b{n}").wait()
        assert len(a.connections.connections_of(f"b{n}")) == 2
        meeting.kill(f"b{n}")
        assert reports.get(timeout=PATIENCE) == f"b{n}"
        until(lambda name=f"b{n}": not a.connections.connections_of(name))  # type: ignore[misc]
        meeting.outcome(f"b{n}")
    meeting.start("c")
    a.peer("c").call(handlers.pid).wait()
    meeting.kill("c")
    assert reports.get(timeout=PATIENCE) == "c", "none of the others was reported twice"
    meeting.outcome("c")


@pytest.mark.parametrize("how", [{}, FAR], ids=["same host", "TCP"])
def test_the_death_of_a_worker_ends_its_calls_and_no_others(
    meeting: Agents, a: Agent, how: dict[str, Any]
) -> None:
    lost: list[str] = []
    heard = threading.Event()
    a.on_lost(lambda name: (lost.append(name), heard.set()))
    for name in "bc":
        meeting.start(name, **how)
    b, c = a.peer("b"), a.peer("c")
    doomed, fine = [blocked(b, "never") for _ in range(5)], blocked(c, "later")
    pid = b.call(handlers.pid).wait()
    meeting.kill("b")
    for future in doomed:
        with pytest.raises(
            WorkerLost, match=rf"worker 'a': .*wait_for at 'b'.*process {pid}.* was lost"
        ) as caught:
            future.wait(PATIENCE)
        assert caught.value.worker == "b"
    c.call(handlers.note, "later", 7).wait()
    assert fine.wait() == 7
    assert heard.wait(PATIENCE)
    assert lost == ["b"]
    meeting.outcome("b")
    with pytest.raises(WorkerLost, match=rf"worker 'a': 'b' \(process {pid}\)"):
        b.call(handlers.pid).wait()
    assert not b.alive
    assert [peer.name for peer in a.peers()] == ["c"]
    with pytest.raises(
        WorkerLost, match=rf"'b' \(process {pid}\) has ended and was not replaced; peer\('b', t"
    ):
        a.peer("b")
    # Another process takes the name, and calls reach that one.
    again = meeting.start("b", **how)
    assert a.peer("b", timeout=PATIENCE).call(handlers.pid).wait() == again
    assert b.call(handlers.pid).wait() == again


@pytest.mark.parametrize("how", [{}, FAR], ids=["same host", "TCP"])
def test_a_connection_that_is_cut_ends_its_calls_and_is_made_again(
    meeting: Agents, a: Agent, how: dict[str, Any]
) -> None:
    meeting.join("b", **how)
    b = a.peer("b")
    future = blocked(b, "x")
    a.endpoint.post.disconnect(a.connection("b", PATIENCE).number)
    with pytest.raises(WorkerLost, match=r"wait_for at 'b'"):
        future.wait(PATIENCE)
    assert b.call(handlers.echo, 1).wait() == 1
    b.call(handlers.note, "x").wait()


def incoming(agent: Agent, name: str) -> list[int]:
    """The connections for the calls of a worker, as the one that is called has them."""
    lines = list(agent.connections._by_number.values())
    return [each.number for each in lines if each.worker.name == name and not (each.is_caller or each.ended)]


def test_nothing_comes_any_more_on_a_connection_that_its_caller_has_replaced(
    meeting: Agents, a: Agent
) -> None:
    """It would be taken after what was sent later: a method out of its order, a hold after its end."""
    b = meeting.join("b")
    log = a.peer("b").actor(Log)
    log.note(1).wait()
    old = a.connection("b", PATIENCE)
    letter, _ = a.endpoint.post.hold(old.number, log._mailbox, 0, None)
    (before,) = incoming(b, "a")
    del a.connections._out["b"]  # as if its end were known here, and had yet to be heard there
    log.note(2).wait()
    (after,) = incoming(b, "a")
    assert before < after
    assert letter.wait(PATIENCE)
    assert letter.error().end is CallEnd.LOST
    assert log.noted().wait() == [1, 2]


def test_an_introduction_that_comes_late_replaces_nothing(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b")
    early = a.connections._hello(b.worker.incarnation, {})
    early.lends = False  # or descriptors were expected
    pending = blocked(a.peer("b"), "go")
    lines = incoming(b, "a")
    with wire.connect_unix(b.worker.unix, secret=a.secret, purpose="rpc", timeout=PATIENCE) as connection:
        wire.send_hello(connection, early, PATIENCE)
        with pytest.raises(WireError, match="closed"):
            connection.recv(PATIENCE)
    assert incoming(b, "a") == lines
    handlers.note("go", 3)
    assert pending.wait() == 3


def test_calls_that_were_made_still_count_when_their_worker_has_gone(meeting: Agents, a: Agent) -> None:
    """Who parts from others compares this number: it must not come back to what it was."""
    b = meeting.join("b")
    for value in range(3):
        a.peer("b").call(handlers.echo, value).wait()
    b.close()
    while a.stats()["peers"]:
        time.sleep(0.001)
    assert a.stats()["made"] == 3


class Log:
    def __init__(self) -> None:
        self._noted: list[int] = []

    def note(self, value: int) -> None:
        self._noted.append(value)

    def noted(self) -> list[int]:
        return self._noted


@pytest.mark.parametrize("end", ["leaves", "dies", "is cut off and leaves"])
def test_who_serves_stays_until_another_worker_has_ended(meeting: Agents, a: Agent, end: str) -> None:
    if end == "dies":
        meeting.start("chief")
    else:
        chief = meeting.join("chief")
    ended = threading.Event()
    serving = threading.Thread(target=lambda: (a.wait(until="chief"), ended.set()), daemon=True)
    serving.start()
    while "chief" not in a.connections._out:
        time.sleep(0.001)
    if end == "dies":
        meeting.kill("chief")
    else:
        if end != "leaves":
            connection = a.connection("chief", PATIENCE)
            a.endpoint.post.disconnect(connection.number)
            while a.connections.existing("chief") in (None, connection):
                time.sleep(0.001)
            assert not ended.is_set()
        chief.close()
    assert ended.wait(PATIENCE)
    serving.join()


def test_who_serves_stays_until_its_agent_is_closed(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b")
    serving = threading.Thread(target=b.wait, daemon=True)
    serving.start()
    a.peer("b").post(close)
    serving.join(PATIENCE)
    assert not serving.is_alive()
    c = meeting.join("c", timeout=PATIENCE)
    c.timeout = 0.05  # not that of joining
    with pytest.raises(UnknownWorker, match="no worker has joined as 'nobody'"):
        c.wait(until="nobody")


def test_a_value_of_too_many_parts_is_refused_and_ends_no_thread(meeting: Agents, a: Agent) -> None:
    meeting.join("b")
    many = [torch.ones(1) for _ in range(70_000)]
    with pytest.raises(
        UsageError, match=r"len at 'b': 70000 tensors .*; one value may have at most 65535: stack them"
    ):
        a.peer("b").call(len, many)
    handlers.noted["many"] = many
    with pytest.raises(UsageError, match=r"the result of .*recall at 'b': 70000 tensors"):
        a.peer("b").call(handlers.recall, "many").wait()
    handlers.noted.clear()
    assert a.peer("b").call(handlers.echo, 1).wait() == 1


def close() -> None:
    from shoal.rpc import current

    current().agent.close()


def test_calls_of_a_lost_caller_that_have_not_begun_never_run(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", handlers=1)
    running = blocked_only(a.peer("b"), "go")
    queued = [a.peer("b").call(handlers.note, f"queued {i}") for i in range(5)]
    a.peer("b").post(handlers.note, "posted")
    while b.stats()["letters"] < 6:
        time.sleep(0.001)
    a.endpoint.post.disconnect(a.connection("b", PATIENCE).number)
    for future in (running, *queued):
        with pytest.raises(WorkerLost):
            future.wait()
    until(lambda: not incoming(b, "a"))  # and none of them is wanted any more
    handlers.note("go")
    handlers.wait_for("posted")
    assert not [key for key in handlers.noted if key.startswith("queued")]


def test_a_name_is_free_again_when_its_worker_has_left(meeting: Agents, a: Agent) -> None:
    with pytest.raises(UsageError, match=r"name='a' is not unique"):
        meeting.join("a")
    first = meeting.join("b")
    b = a.peer("b")
    assert b.call(handlers.echo, 1).wait() == 1
    first.close()
    with pytest.raises((UnknownWorker, WorkerLost)):
        b.call(handlers.echo, 1).wait()
    meeting.join("b")
    assert a.peer("b").call(handlers.echo, 2).wait() == 2
    assert b.call(handlers.echo, 3).wait() == 3


def test_who_is_not_there_is_waited_for_and_then_told(meeting: Agents, a: Agent) -> None:
    late = threading.Timer(0.1, meeting.join, ["late"])
    late.start()
    assert a.peer("late").call(handlers.echo, 1).wait() == 1
    late.join()
    with pytest.raises(
        UnknownWorker,
        match=r"worker 'a': no worker has joined as 'ps' within 0\.05 s, or it has left; .*'a', 'late'",
    ):
        a.peer("ps", timeout=0.05)
    with pytest.raises(UsageError, match=r"1\.5 is neither the name nor the rank"):
        a.peer(1.5)  # type: ignore[arg-type]


def test_closing_lets_handlers_finish(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b")
    future = blocked(a.peer("b"), "go")
    closing = threading.Thread(target=b.close)
    closing.start()
    handlers.note("go", 5)
    assert future.wait() == 5
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_closing_serves_as_long_as_what_was_there_takes_and_then_refuses_calls(
    meeting: Agents, a: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, peer = meeting.join("b"), a.peer("b")
    first = blocked(peer, "one")
    closing = threading.Thread(target=b.close, kwargs={"timeout": 4 * PATIENCE})
    waits = threading.Event()
    sleep = lambda seconds: (waits.set(), time.sleep(seconds))  # noqa: E731
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    closing.start()
    assert waits.wait(PATIENCE)  # it has noted what was there
    second = peer.call(handlers.blocked, "two")
    until(lambda: handlers.recall("two runs"))
    handlers.note("one", 1)
    assert first.wait(PATIENCE) == 1
    with pytest.raises(AgentClosed, match=r"worker 'b': its agent was closed before the call began"):
        until(lambda: peer.call(handlers.pid).wait(PATIENCE) is None)
    handlers.note("two", 2)
    assert second.wait(PATIENCE) == 2
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_callers_that_go_on_calling_do_not_hold_up_a_close(meeting: Agents, a: Agent) -> None:
    b, peer = meeting.join("b"), a.peer("b")
    answered: list[int] = []
    ended: list[BaseException] = []

    def call_again(future: Any) -> None:
        try:
            answered.append(future.value())
            peer.call(handlers.nap, 0.02).add_done_callback(call_again)
        except RpcError as error:
            ended.append(error)

    for _ in range(8):  # so some call is served at every moment
        peer.call(handlers.nap, 0.02).add_done_callback(call_again)
    until(lambda: len(answered) > 8)
    begun = time.monotonic()
    b.close(4 * PATIENCE)
    assert time.monotonic() < begun + PATIENCE
    until(lambda: len(ended) == 8)
    assert {type(error) for error in ended} <= {AgentClosed, UnknownWorker, WorkerLost}


def test_closing_takes_up_posts_that_wait(meeting: Agents, a: Agent) -> None:
    b, peer = meeting.join("b", handlers=1), a.peer("b")
    first = blocked_only(peer, "go")
    for i in range(20):
        peer.post(handlers.note, f"post {i}")
    until(lambda: b.stats()["letters"] == 20)
    closing = threading.Thread(target=b.close)
    closing.start()
    until(lambda: b.closed)
    handlers.note("go", 5)
    assert first.wait(PATIENCE) == 5
    closing.join(PATIENCE)
    assert all(handlers.recall(f"post {i}") for i in range(20))


def test_closing_without_grace_does_not_wait_for_what_handlers_do(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b")
    future = blocked(a.peer("b"), "never")
    closing = threading.Thread(target=b.close, kwargs={"timeout": 4 * PATIENCE, "graceful": False})
    closing.start()
    closing.join(PATIENCE / 2)  # the handler gives up later than that
    assert not closing.is_alive()
    with pytest.raises(WorkerLost):
        future.wait(PATIENCE)
    handlers.note("never")


def test_a_handler_may_close_its_agent(meeting: Agents, a: Agent) -> None:
    meeting.join("b")
    future = a.peer("b").call(close)
    with pytest.raises(WorkerLost):
        future.wait(PATIENCE)


def test_a_closed_agent_refuses_and_its_calls_end(meeting: Agents, a: Agent) -> None:
    meeting.join("b")
    b = a.peer("b")
    future = blocked(b, "never")
    a.close(1, graceful=False)
    with pytest.raises(AgentClosed, match=r"worker 'a': .*wait_for at 'b'"):
        future.wait(PATIENCE)
    for use in (
        lambda: a.peer("b"),
        lambda: a.peers(),
        lambda: a.barrier(),
        lambda: b.call(handlers.pid).wait(),
    ):
        with pytest.raises(AgentClosed, match=r"worker 'a': the agent is closed"):
            use()
    a.close()
    handlers.note("never")


def test_closing_never_takes_longer_than_it_may(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b")
    future = blocked(a.peer("b"), "never")
    b.close(0.5)
    with pytest.raises((WorkerLost, AgentClosed)):
        future.wait(PATIENCE)
    handlers.note("never")


def test_nothing_is_left_behind() -> None:
    def use() -> None:
        handlers.noted.clear()
        with Agents() as meeting:
            a, b = meeting.join("a"), meeting.join("b", **FAR)
            assert a.peer("b").call(torch.add, torch.ones(100_000), 1).wait().sum() == 200_000
            assert b.peer("a").call(handlers.async_double, 2).wait() == 4
            doomed = blocked(a.peer("b"), "never")
            handlers.note("never")
            doomed.wait()

    use()  # what stays for ever comes with the first use
    with no_leaks():
        use()


def test_a_stranger_is_not_heard(meeting: Agents, a: Agent) -> None:
    meeting.join("b")
    with socket.create_connection((a.worker.address, a.worker.port)) as stranger:
        stranger.sendall(b"\x80\x05" * 1000)
        assert a.peer("b").call(handlers.echo, 1).wait() == 1
        with pytest.raises(UsageError):
            meeting.join("c", memory=-1)


def test_an_exit_ends_the_callee_and_not_the_caller(meeting: Agents, a: Agent) -> None:
    meeting.start("b")
    b = a.peer("b")
    with pytest.raises((RemoteError, WorkerLost), match=r"SystemExit: 3|was lost"):
        b.call(sys.exit, 3).wait()
    assert not meeting.outcome("b").ok


def test_workers_wait_for_one_another(meeting: Agents, a: Agent) -> None:
    meeting.join("b")
    b = a.peer("b")
    for _ in range(3):
        there = b.call(barrier, ["a", "b"])
        a.barrier(["b", "a"])
        there.wait()
    with pytest.raises(UnknownWorker, match="'b' did not reach a barrier of 2 workers"):
        a.barrier(timeout=0.05)
    with pytest.raises(UsageError, match="which must include this worker"):
        a.barrier(["b"])
    with pytest.raises(UsageError, match="barrier of 'ab': expected the names of workers"):
        a.barrier("ab")


@pytest.mark.concurrency
def test_barriers_leave_no_keys(meeting: Agents, a: Agent) -> None:
    names = ["a", "b", "c"]
    agents = [a, *(meeting.join(name, timeout=PATIENCE) for name in names[1:])]
    wrong: list[Exception] = []

    def come(agent: Agent, times: int) -> None:
        chance = random.Random(agent.name)
        try:
            for _ in range(times):
                agent.barrier(names)
                if chance.random() < 0.3:
                    time.sleep(chance.random() / 1000)
        except Exception as error:
            wrong.append(error)

    def all_come(agents: list[Agent], times: int) -> list[str]:
        """Have all come; the keys that are left."""
        threads = [threading.Thread(target=come, args=(agent, times)) for agent in agents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        return [key for key in meeting.store.list_keys("") if "barrier" in key]

    assert all_come(agents, 30) == []
    with pytest.raises(UnknownWorker):
        agents[0].barrier(names, timeout=0.01)
    assert all_come(agents[1:], 1) == [], "those of a worker that gave up go too"


def test_a_barrier_ends_on_all_workers_if_one_dies_that_has_come(meeting: Agents, a: Agent) -> None:
    """A worker that looks up the members afterwards does not come, so the others must not wait for it."""
    names = ["a", "b", "c"]
    meeting.start("b")
    c = meeting.join("c")
    a.peer("b").post(barrier, names)
    with ThreadPoolExecutor() as threads:
        future = threads.submit(a.barrier, names, PATIENCE)
        until(lambda: sum("/came/" in key for key in meeting.store.list_keys("")) == 2)
        meeting.kill("b")
        meeting.outcome("b")
        with pytest.raises(WorkerLost, match="'b'"):
            c.barrier(names)
        with pytest.raises(WorkerLost, match="'b'"):
            future.result()


def test_a_barrier_is_none_of_an_earlier_worker_of_the_name(meeting: Agents, a: Agent) -> None:
    def both() -> None:
        there = a.peer("b").call(barrier, ["a", "b"])
        a.barrier(["a", "b"])
        there.wait()

    first = meeting.join("b")
    both()
    first.close()
    second = meeting.join("b")
    both()
    second.close()
    third = meeting.join("b")
    with pytest.raises(UnknownWorker, match="'a' did not reach a barrier of 2 workers"):
        third.barrier(["a", "b"], timeout=0.05)


def barrier(names: list[str]) -> None:
    from shoal.rpc import current

    current().agent.barrier(names)


def test_a_worker_leaves_in_good_order(meeting: Agents, a: Agent) -> None:
    assert meeting.start("b") != os.getpid()
    meeting.leave("b")
    assert meeting.outcome("b").exitcode == 0
    assert a.peers() == []
