"""How long objects live whose holders are lost, or cut off for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal import Future
from shoal.errors import WorkerLost
from shoal.rpc import Agent, Peer, RRef
from shoal.rpc.calls import call, holds
from shoal.rpc.calls.objects import ObjectTable
from shoal.testing import Agents
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.rpc.test_references import Table, become, keep, let_go, pull, use_kept


def test_a_use_that_overtakes_the_making_of_an_object_waits_for_it() -> None:
    objects = ObjectTable(lambda mailbox: None)
    early = objects.hold("maker/1", "")
    objects.drop("maker/1", "")  # the reference that came with the use has gone
    assert objects.begin("maker/1", "maker", "Table") is early
    early.value.set_result(None)
    objects.drop("maker/1", "maker")
    assert not objects.held()


def test_an_object_that_nobody_will_make_is_lost_with_who_asked_for_it() -> None:
    objects = ObjectTable(lambda mailbox: None)
    early = objects.hold("maker/1", "")
    objects.drop("maker/1", "")
    objects.forget("another")
    assert not early.value.done()
    objects.forget("maker")
    with pytest.raises(WorkerLost, match="maker/1 was never made"):
        early.value.wait()
    assert not objects.held()


def test_who_comes_again_holds_what_it_says_and_what_it_has_told_since() -> None:
    objects = ObjectTable(lambda mailbox: None)
    for ident in ("x/1", "x/2", "x/3"):
        objects.begin(ident, "holder", "Table", connection=1)
    objects.hold("x/2", "another", 1)
    objects.hold("x/3", "holder", 2)
    objects.begin("holder/4", "holder", "Table", connection=2)
    objects.replace_holds("holder", ["x/1", "x/2"], 2)
    assert objects.held().keys() == {"x/1", "x/2", "x/3", "holder/4"}
    objects.replace_holds("holder", ["x/1"], 3)
    assert objects.held().keys() == {"x/1", "x/2"}
    assert objects.held()["x/2"].holders.keys() == {"another"}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Agent, Agent]]:
    """``owner`` and ``holder``, both in this process, which forget a lost worker soon."""
    handlers.noted.clear()
    for each in (holds, call):
        monkeypatch.setattr(each, "LEASE_S", 6.0)
    with Agents() as stage:
        yield stage.join("owner", timeout=PATIENCE), stage.join("holder", timeout=PATIENCE)


def cut(agent: Agent) -> None:
    """Break all connections of an agent."""
    for number in list(agent.connections._by_number):
        agent.endpoint.post.disconnect(number)


def test_a_hold_that_was_given_back_while_the_connection_broke_ends(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, holder = pair
    first, second = holder.peer("owner").remote(Table), holder.peer("owner").remote(Table)
    assert pull(first) == pull(second) == [0, 0]
    given: list[Any] = []
    tell = holder.post_to_owner

    def breaks(*told: Any) -> None:
        given.append(told)
        monkeypatch.setattr(holder, "post_to_owner", tell)
        cut(owner)
        raise WorkerLost("it was cut on its way", "owner")

    monkeypatch.setattr(holder, "post_to_owner", breaks)
    del second
    become(1, lambda: len(given))
    become([1, True], lambda: [len(owner.leaks()), not owner.references._losses])
    assert pull(first) == [0, 0]


def test_a_hold_is_told_again_when_its_connection_breaks(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, holder = pair
    ask = holder.call_owner
    asked: list[Any] = []

    def breaks_once(to: Any, *told: Any) -> Any:
        asked.append(told)
        if len(asked) > 1:
            return ask(to, *told)
        holder.peer("owner").call(handlers.pid).wait()
        cut(owner)
        failed: Future[Any] = Future()
        failed.set_exception(WorkerLost("it was cut on its way", "owner"))
        return failed

    monkeypatch.setattr(holder, "call_owner", breaks_once)
    ref = RRef(Table(5.0), owner)
    owner.peer("holder").post(keep, ref)
    handlers.wait_for("kept")
    assert len(asked) > 1
    mine = ref.ident
    del ref
    become([[mine], ["holder"]], lambda: [list(owner.references.objects.held()), holders(owner, mine)])
    assert use_kept() == [5, 5]
    let_go()
    become([], owner.leaks)


def holders(owner: Agent, ident: str) -> list[str]:
    owned = owner.references.objects.held().get(ident)
    names = {worker.incarnation: worker.name for worker in owner.directory.workers()}
    return [] if owned is None or owned.local else [names[each] for each in owned.holders]


def test_what_a_worker_asked_for_that_is_lost_meanwhile_ends_with_a_lease(pair: tuple[Agent, Agent]) -> None:
    owner, holder = pair
    ref = holder.peer("owner").remote(Table, Late("arrive"))
    handlers.wait_for("arrive awaited")
    holder.close(0.5, graceful=False)
    become({}, lambda: owner.references._losses)
    handlers.note("arrive", 1.0)
    handlers.wait_for("arrived")
    become([], owner.leaks)
    del ref


class Late:
    """It is unpickled when something was noted."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return come_late, (self.key,)


def come_late(key: str) -> Any:
    handlers.note(f"{key} awaited")
    value = handlers.wait_for(key)
    handlers.note("arrived")
    return value


def test_the_holds_of_a_lost_worker_end_with_their_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    with Agents() as stage:
        stage.start("holder")
        owner = stage.join("owner", timeout=PATIENCE)
        holder = owner.peer("holder")
        holder.call(keep, RRef(Table(1.0), owner)).wait()
        assert holder.call(use_kept).wait() == [1, 1]
        become(["RRef of Table: held by 'holder'"], owner.leaks)
        # Only the connections break: the holder comes again, so the end of a lease takes nothing from it.
        for number in list(owner.connections._by_number):
            owner.endpoint.post.disconnect(number)
        become([1, 1], lambda: _tried(holder))
        again = owner.connection("holder", PATIENCE).worker
        become(True, lambda: again.incarnation in owner.references._losses)
        owner.references._end_lease(again.incarnation, owner.references._losses[again.incarnation])
        assert holder.call(use_kept).wait() == [1, 1]
        # Nor does the end of an earlier one when it has just been lost once more.
        owner.references._losses[again.incarnation] = earlier = object()
        owner.references.lost(again)
        monkeypatch.setattr(owner.connections, "is_connected", lambda _: False)
        owner.references._end_lease(again.incarnation, earlier)
        assert holder.call(use_kept).wait() == [1, 1]
        monkeypatch.undo()
        monkeypatch.setattr(holds, "LEASE_S", 0.2)
        stage.kill("holder")
        become([], owner.leaks)


def _tried(holder: Peer) -> Any:
    try:
        return holder.call(use_kept).wait()
    except WorkerLost:
        return None
