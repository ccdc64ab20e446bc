"""Objects that stay with another worker: what can be done with them, and how long they live."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shoal import Future
from shoal.errors import CallTimeout, RpcError, UsageError, WorkerLost
from shoal.rpc import Agent, Peer, RRef, async_execution, current
from shoal.testing import Agents
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.support.waiting import until

living: set[int] = set()


class Table:
    """Counts those of its kind that live in the process."""

    def __init__(self, start: float = 0.0) -> None:
        if start < 0:
            raise ValueError("less than nothing")
        self.x = torch.full((2,), start)
        self.seen: list[Any] = []
        living.add(id(self))

    def __del__(self) -> None:
        living.discard(id(self))

    def __getstate__(self) -> dict[str, Any]:
        return {"x": self.x, "seen": self.seen}

    def push(self, grad: torch.Tensor) -> None:
        self.x += grad

    def pull(self) -> torch.Tensor:
        return self.x

    def note(self, value: Any) -> None:
        self.seen.append(value)

    def noted(self) -> list[Any]:
        return self.seen

    def slowly(self, value: Any) -> None:
        before = list(self.seen)
        time.sleep(0.001)
        self.seen = [*before, value]

    async def slowly_async(self, value: Any) -> None:
        import asyncio

        before = list(self.seen)
        await asyncio.sleep(0.001)
        self.seen = [*before, value]

    async def double(self) -> torch.Tensor:
        return 2 * self.x

    @async_execution
    def no_future(self) -> int:
        return 1

    @async_execution
    def later(self) -> Future[int]:
        future: Future[int] = Future()
        threading.Timer(0.01, future.set_result, [5]).start()
        return future

    def graph(self) -> torch.Tensor:
        return 2 * self.x.requires_grad_()

    def wait(self) -> None:
        handlers.until_cancelled("method")

    def me(self) -> Table:
        return self


async def table_async(start: float) -> Table:
    return Table(start)


@async_execution
def table_later(start: float) -> Future[Table]:
    future: Future[Table] = Future()
    threading.Timer(0.01, future.set_result, [Table(start)]).start()
    return future


def count() -> int:
    gc.collect()
    return len(living)


def pull(ref: RRef[Table]) -> list[float]:
    return ref.rpc_sync().pull().tolist()


def keep(ref: Any, key: str = "kept") -> None:
    handlers.noted[key] = ref


def use_kept(key: str = "kept") -> Any:
    return handlers.noted[key].rpc_sync().pull().tolist()


def let_go(key: str = "kept") -> None:
    del handlers.noted[key]
    gc.collect()


def own(start: float) -> RRef[Table]:
    return RRef(Table(start), current().agent)


def is_mine(ref: RRef[Any]) -> bool:
    return ref.is_owner() and ref.local_value() is ref.to_here()


def peer_name(peer: Peer) -> str:
    return peer.name if peer.call(handlers.echo, 1).wait() == 1 else ""


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Agent, Peer, Peer]]:
    """``a`` here, ``b`` and ``c`` in processes of their own."""
    handlers.noted.clear()
    with Agents() as stage:
        for name in "bc":
            stage.start(name, timeout=PATIENCE)
        a = stage.join("a", timeout=PATIENCE)
        yield a, a.peer("b"), a.peer("c")


@pytest.fixture
def b(agents: tuple[Agent, Peer, Peer]) -> Peer:
    return agents[1]


@pytest.fixture
def c(agents: tuple[Agent, Peer, Peer]) -> Peer:
    return agents[2]


def become(value: Any, what: Callable[[], Any]) -> None:
    """Wait until something is so, of which garbage may be the cause."""

    def is_so() -> bool:
        gc.collect()
        if what() == value:
            return True
        time.sleep(0.02)  # a collection takes as long, and the processor
        return False

    until(is_so, what)


def test_an_object_stays_there_and_its_methods_are_called(b: Peer) -> None:
    ref = b.remote(Table, 1.0)
    assert (ref.owner_name(), ref.owner().name, ref.is_owner()) == ("b", "b", False)
    ref.rpc_async().push(torch.ones(2)).wait()
    assert ref.rpc_sync().pull().tolist() == [2, 2]
    assert ref.rpc_sync().double().tolist() == [4, 4]
    assert ref.rpc_sync().later() == 5
    assert ref.remote().pull().to_here().tolist() == [2, 2]
    copy = ref.to_here()
    copy.x += 1
    assert ref.to_here().x.tolist() == [2, 2]
    assert ref.confirmed_by_owner()
    with pytest.raises(
        UsageError, match=r"worker 'a': <shoal.rpc.RRef .* at 'b'> is not owned by this worker"
    ):
        ref.local_value()
    assert b.remote(table_async, 3.0).to_here().x.tolist() == [3, 3]
    assert b.remote(handlers.later, 4).to_here() == 4


def test_what_has_to_return_a_future_is_refused_without_one(b: Peer) -> None:
    for use in (b.remote(Table).rpc_async().no_future().wait, b.remote(handlers.no_future).to_here):
        with pytest.raises(
            UsageError, match=r"no_future is marked async_execution: expected a .*Future, got int"
        ):
            use()


def test_an_actor_is_made_by_functions_that_need_not_be_waited_for(b: Peer) -> None:
    assert b.actor(table_later, 3.0).pull().wait().tolist() == [3, 3]
    for make, words in ((table_async, "is an async def"), (handlers.no_future, "expected a shoal.Future")):
        with pytest.raises(UsageError, match=words):
            b.actor(make, *[3.0] * (make is table_async))


def test_what_making_an_object_raises_its_users_hear(b: Peer) -> None:
    ref = b.remote(Table, -1.0)
    for use in (ref.to_here, lambda: ref.rpc_sync().pull(), lambda: ref.to_here()):
        with pytest.raises(ValueError, match="less than nothing"):
            use()


def test_the_users_of_an_object_hear_that_its_making_was_cut_off(b: Peer, c: Peer) -> None:
    """They would else wait for it as long as they are allowed to."""
    cancelled = b.remote(handlers.until_cancelled_async, "the making")
    b.call(handlers.wait_for, "the making runs").wait()
    assert cancelled.created is not None
    assert cancelled.created.cancel()
    for ref in (cancelled, b.remote(handlers.interrupt)):
        for peer in (b, c):
            with pytest.raises(
                RpcError,
                match=r"was never made: (.a. no longer waits for the call|its making ended with Interr)",
            ):
                peer.call(RRef.to_here, ref).wait(PATIENCE)


def test_an_object_lives_as_long_as_somebody_holds_it(b: Peer, c: Peer) -> None:
    become(0, lambda: b.call(count).wait())
    ref = b.remote(Table, 7.0)
    c.call(keep, ref).wait()
    del ref
    for _ in range(3):
        assert c.call(use_kept).wait() == [7, 7]
    assert b.call(count).wait() == 1
    c.call(let_go).wait()
    become(0, lambda: b.call(count).wait())


def test_a_reference_used_and_dropped_at_once_works(b: Peer) -> None:
    for i in range(30):
        assert b.remote(Table, float(i)).rpc_async().pull().wait().tolist() == [i, i]
        b.remote(Table, 1.0).rpc_async().push(torch.ones(2))
    become(0, lambda: b.call(count).wait())


def test_references_go_from_hand_to_hand(agents: tuple[Agent, Peer, Peer], b: Peer, c: Peer) -> None:
    a = agents[0]
    assert c.call(pull, b.remote(Table, 2.0)).wait() == [2, 2]
    theirs = c.call(own, 3.0).wait()
    assert theirs.owner_name() == "c"
    assert b.call(pull, theirs).wait() == [3, 3]
    assert c.call(is_mine, theirs).wait()
    mine = RRef(Table(4.0), a)
    assert mine.is_owner()
    assert b.call(pull, mine).wait() == [4, 4]
    assert mine.local_value().x.tolist() == [4, 4]
    assert [pull(ref) for ref in b.call(handlers.echo, [theirs, mine]).wait()] == [[3, 3], [4, 4]]
    become(["RRef of Table: held by nobody else"], a.leaks)  # b lets go when the reply has been taken up
    del theirs, mine
    become([], a.leaks)
    become(0, lambda: c.call(count).wait())


def test_many_references_passed_about_at_once_are_neither_lost_nor_left(b: Peer, c: Peer) -> None:
    become(0, lambda: b.call(count).wait())
    wrong: list[Any] = []

    def work(k: int) -> None:
        for i in range(20):
            ref = b.remote(Table, float(i))
            future = c.call(pull, ref)
            back = c.call(handlers.echo, ref)
            del ref
            if future.wait() != [i, i] or pull(back.wait()) != [i, i]:
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    become(0, lambda: b.call(count).wait())


def test_a_reference_is_for_workers_only(agents: tuple[Agent, Peer, Peer], b: Peer) -> None:
    import pickle

    with pytest.raises(UsageError, match="can only be sent to other workers"):
        pickle.dumps(b.remote(Table))
    with pytest.raises(UsageError, match="can only be sent to other workers"):
        pickle.dumps(b)


def test_peers_are_passed_on(b: Peer, c: Peer) -> None:
    assert b.call(peer_name, c).wait() == "c"


@pytest.mark.parametrize("method", ["slowly", "slowly_async"])
def test_the_methods_of_an_actor_run_one_at_a_time_and_in_order(b: Peer, method: str) -> None:
    actor = b.actor(Table)
    futures = [getattr(actor, method)(i) for i in range(50)]
    for future in futures:
        future.wait()
    assert actor.noted().wait() == list(range(50))


def test_many_call_an_actor_each_in_its_order(b: Peer, c: Peer) -> None:
    actor = b.actor(Table)
    there = c.call(note_many, actor, "c", 50)
    note_many(actor, "a", 50)
    there.wait()
    seen = actor.noted().wait()
    assert len(seen) == 100
    for who in "ac":
        assert [i for each, i in seen if each == who] == list(range(50))


def note_many(actor: Any, who: str, n: int) -> None:
    for future in [actor.note((who, i)) for i in range(n)]:
        future.wait()


def threads_there() -> int:
    """Those of actors: others come and go with the load."""
    return len(current().agent.executor._other_threads)


def test_an_actor_that_nobody_holds_ends_with_its_thread(b: Peer) -> None:
    become(0, lambda: b.call(count).wait())
    before = b.call(threads_there).wait()
    actors = [b.actor(Table) for _ in range(20)]
    assert b.call(count).wait() == 20
    assert b.call(threads_there).wait() >= before + 15
    with pytest.raises(ValueError, match="less than nothing"):
        b.actor(Table, -1.0)
    del actors
    become(0, lambda: b.call(count).wait())
    become(True, lambda: b.call(threads_there).wait() < before + 15)


def test_errors_name_the_method_of_an_object_and_not_what_calls_it(b: Peer) -> None:
    ref = b.remote(Table)
    with pytest.raises(UsageError, match=r"the result of method graph of an object at 'b': a tensor"):
        ref.rpc_sync().graph()
    with pytest.raises(
        CallTimeout, match=r"'a': method wait of an object at 'b' had no reply within 0\.05 s"
    ):
        ref.rpc_sync(timeout=0.05).wait()
    with pytest.raises(UsageError, match=r"'a': tests\.rpc\.test_references\.Table at 'b' cannot be sent"):
        b.remote(Table, threading.Lock())
    b.actor(Table).note("end").wait()


def test_with_its_owner_an_object_is_gone(agents: tuple[Agent, Peer, Peer]) -> None:
    a = agents[0]
    with Agents() as stage:
        stage.start("d")
        e = stage.join("e", timeout=PATIENCE)
        d = e.peer("d")
        ref, actor = d.remote(Table), d.actor(Table)
        assert pull(ref) == [0, 0]
        stage.kill("d")
        stage.outcome("d")
        with pytest.raises(WorkerLost):
            ref.to_here()
        stage.start("d")
        assert e.peer("d", timeout=PATIENCE).call(handlers.echo, 1).wait() == 1
        for use in (ref.to_here, lambda: actor.noted().wait(), lambda: ref.rpc_sync().pull()):
            with pytest.raises(
                WorkerLost, match=r"worker 'e': 'd' \(process .*\), which owned an object, has ended"
            ):
                use()
    assert a.peers()


def own_later(key: str) -> RRef[Table]:
    handlers.wait_for(key)
    return own(1.0)


class Carrying(Exception):
    """It brings a reference along."""


def raise_with_reference() -> None:
    raise Carrying(own(5.0))


def pinned() -> int:
    return len(current().agent.references._pinned)


def test_the_references_of_a_reply_that_nobody_looks_at_end(b: Peer) -> None:
    def left() -> list[int]:
        return [b.call(count).wait(), b.call(pinned).wait()]

    become([0, 0], left)
    there = b.call(own, 1.0)
    b.call(handlers.wait_for, "turn")  # dropped while it is pending, without a reference
    coming = b.call(own_later, "turn")
    cancelled = b.call(own_later, "turn")
    refused = b.call(raise_with_reference)
    become(0, lambda: b.call(pinned).wait() - 2)  # those of the two that have their replies
    del there, coming, refused
    cancelled.cancel()
    del cancelled
    b.call(handlers.note, "turn").wait()
    become([0, 0], left)
    with pytest.raises(Carrying) as caught:
        b.call(raise_with_reference).wait()
    ref = caught.value.args[0]
    assert pull(ref) == [5, 5]
    del ref, caught
    become([0, 0], left)


def test_calls_whose_futures_are_dropped_do_not_pile_up(agents: tuple[Agent, Peer, Peer], b: Peer) -> None:
    for _ in range(2000):
        b.call(handlers.echo, 1)
    b.call(handlers.echo, 1).wait()
    assert len(agents[0].references._unread) <= 2000

    def few_are_left() -> bool:
        for _ in range(200):  # they are looked through when they have doubled
            b.call(handlers.echo, 1)
        return len(agents[0].references._unread) <= 2 * 256

    become(True, few_are_left)


def test_the_use_of_an_object_that_has_ended_raises(b: Peer) -> None:
    become(0, lambda: b.call(count).wait())
    ref = b.remote(Table, 3.0)
    assert ref.rpc_sync().pull().tolist() == [3, 3]
    b.call(end_leases).wait()
    become(0, lambda: b.call(count).wait())  # the reference that came with the use goes later
    for use in (ref.rpc_sync().pull, ref.to_here, lambda: b.call(push_at, ref).wait()):
        with pytest.raises(RpcError, match=rf"the object {ref.ident} was released"):
            use()


def end_leases() -> None:
    """As when the caller was cut off for longer than its holds last."""
    agent = current().agent
    agent.references.objects.forget(agent.directory.look(current().caller).incarnation)


def push_at(table: RRef[Table]) -> None:
    table.rpc_sync().push(torch.ones(2))


def test_a_method_whose_object_is_late_reports_the_timeout_of_its_call(meeting: Agents, a: Agent) -> None:
    meeting.join("b", timeout=PATIENCE)
    late = a.peer("b").remote(handlers.wait_for, "go")
    ref = late.remote(timeout=0.1).upper()
    words = "worker 'b': method upper of an object, for 'a', timed out"
    with pytest.raises(CallTimeout, match=words):
        ref.to_here(timeout=PATIENCE)
    handlers.note("go", "gone")
    assert late.rpc_sync().upper() == "GONE"
