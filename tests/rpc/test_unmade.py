"""Objects that are never made: their users hear why, whatever ended the making, and nothing is left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.errors import CallCancelled, RpcError, UsageError, WorkerLost
from shoal.rpc import Agent, RRef
from shoal.rpc.calls import call, holds
from shoal.rpc.calls.objects import ObjectTable
from shoal.testing import Agents
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.rpc.test_holds import Late
from tests.rpc.test_references import become
from tests.support.waiting import until

made: list[Any] = []


def make(*args: Any) -> dict[str, Any]:
    made.append(args)
    return {"args": args}


class Unbuildable:
    """It can be pickled, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return fall_apart, ()


def fall_apart() -> Any:
    raise LookupError("it falls apart")


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Agent, Agent, Agent]]:
    """``maker``, ``owner``, which handles one call at a time, and ``user``."""
    handlers.noted.clear()
    made.clear()
    monkeypatch.setattr(call, "LEASE_S", 0.2)
    with Agents() as stage:
        owner = stage.join("owner", timeout=PATIENCE, handlers=1)
        maker, user = (stage.join(name, timeout=PATIENCE) for name in ("maker", "user"))
        for agent in (maker, user):
            assert agent.peer("owner").call(handlers.echo, 1).wait() == 1
        yield maker, owner, user


def occupy(agent: Agent, key: str) -> Any:
    """Let ``owner`` handle a call until ``key`` was noted; what queues behind it stays queued."""
    future = agent.peer("owner").options(timeout=3 * PATIENCE).call(handlers.blocked, key)
    handlers.wait_for(f"{key} runs")
    return future


def wait_until_known(owner: Agent, ref: RRef[Any]) -> None:
    """Wait until the owner has heard of a holder."""
    become(True, lambda: ref.ident in owner.references.objects.held())


def cancel(maker: Agent, owner: Agent, ref: RRef[Any]) -> None:
    assert ref.created is not None
    queued = owner.stats()["letters"]
    assert ref.created.cancel()
    become(max(0, queued - 1), lambda: owner.stats()["letters"])


def cut_off(maker: Agent, owner: Agent, ref: RRef[Any]) -> None:
    connections = list(owner.connections._by_number.items())
    numbers = [number for number, connection in connections if connection.worker.name == "maker"]
    for number in numbers:
        owner.endpoint.post.disconnect(number)
    assert ref.created is not None
    with pytest.raises(WorkerLost):
        ref.created.wait()
    # Before the owner knows of the loss, it would still make the object.
    become(True, lambda: all(map(owner.connections.ended, numbers)))


def run_out(maker: Agent, owner: Agent, ref: RRef[Any]) -> None:
    assert ref.created is not None
    until(ref.created.done)


@pytest.mark.parametrize(
    ("timeout", "end", "error", "words"),
    [
        (PATIENCE, cancel, CallCancelled, "make at 'owner' was cancelled"),
        (8.0, run_out, RpcError, r"make at 'owner' had no reply within 8 s"),
        (PATIENCE, cut_off, RpcError, r"make at 'owner'.* was lost before it replied"),
    ],
)
def test_users_hear_why_an_object_is_never_made(
    three: tuple[Agent, Agent, Agent], timeout: float, end: Any, error: type[Exception], words: str
) -> None:
    maker, owner, user = three
    busy = occupy(user, "go on")
    ref = maker.peer("owner").options(timeout=timeout).remote(make)
    become(1, lambda: owner.stats()["letters"])
    maker.peer("user").call(handlers.note, "kept", ref).wait()
    wait_until_known(owner, ref)
    end(maker, owner, ref)
    handlers.note("go on")
    busy.wait()
    kept = handlers.noted.pop("kept")
    for _ in range(2):
        with pytest.raises(error, match=rf"{ref.ident} was never made: worker 'maker': .*{words}"):
            kept.to_here()
    with pytest.raises(error, match="was never made"):
        maker.peer("user").call(RRef.to_here, ref).wait()
    assert not made
    del ref, kept
    become([], owner.leaks)


def test_an_object_whose_arguments_cannot_be_rebuilt_is_never_made(three: tuple[Agent, Agent, Agent]) -> None:
    maker, owner, user = three
    busy = occupy(user, "go on")
    ref = maker.peer("owner").remote(make, Unbuildable())
    seen = maker.peer("user").call(RRef.to_here, ref)
    mine = ref.rpc_async().keys()
    handlers.note("go on")
    busy.wait()
    for future in (seen, mine):
        with pytest.raises(RpcError, match=r"was never made: .*LookupError: it falls apart"):
            future.wait()
    del ref
    become([], owner.leaks)


def test_a_making_that_comes_too_late_makes_nothing(three: tuple[Agent, Agent, Agent]) -> None:
    maker, owner, _ = three
    ref = maker.peer("owner").remote(make, Late("arrive"))
    handlers.wait_for("arrive awaited")  # its letter is taken, and no call to make it has begun
    maker.peer("user").call(handlers.note, "kept", ref).wait()
    cancel(maker, owner, ref)
    ident = ref.ident
    become(True, lambda: ident in owner.references.objects._ended)
    handlers.note("arrive", 1.0)
    handlers.wait_for("arrived")
    with pytest.raises(CallCancelled, match="was cancelled"):
        handlers.noted.pop("kept").to_here()
    assert not made
    del ref
    become([], owner.leaks)


def test_nothing_is_left_of_a_making_that_nobody_heard_of(three: tuple[Agent, Agent, Agent]) -> None:
    maker, owner, user = three
    busy = occupy(user, "go on")
    ref = maker.peer("owner").remote(make)
    use = ref.rpc_async().keys()
    become(2, lambda: owner.stats()["letters"])
    cancel(maker, owner, ref)
    del ref
    handlers.note("go on")
    busy.wait()
    with pytest.raises(CallCancelled, match="was cancelled"):
        use.wait()
    assert not made
    become([], owner.leaks)


def test_an_object_that_a_worker_asks_itself_for_may_never_be_made(three: tuple[Agent, Agent, Agent]) -> None:
    _, owner, user = three
    owner.peer("owner").call(int).wait()  # connecting takes none of the time below
    busy = occupy(user, "go on")
    ref = owner.peer("owner").options(timeout=0.1).remote(make)
    seen = owner.peer("user").call(RRef.to_here, ref)
    become(True, ref._value().done)
    handlers.note("go on")
    busy.wait()
    for use in (seen.wait, ref.to_here):
        with pytest.raises(RpcError, match=r"was never made: .* had no reply"):
            use()
    with pytest.raises(UsageError, match="cannot be sent"):
        owner.peer("owner").remote(make, threading.Lock())
    assert not made
    del ref
    become([], owner.leaks)


@pytest.mark.parametrize("name", ["owner", "maker"])
def test_an_interrupt_while_an_object_is_asked_for_leaves_nothing(
    three: tuple[Agent, Agent, Agent], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The call is on its way, and no future tells of it."""
    maker, owner, _ = three
    to = maker if name == "maker" else owner
    request = call.request

    def interrupted(*args: Any, **how: Any) -> Any:
        request(*args, **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(call, "request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        maker.peer(name).remote(make)
    monkeypatch.undo()
    become(0, lambda: to.stats()["handled"] + to.stats()["letters"])
    become([], to.leaks)


def test_an_actor_whose_maker_is_lost_meanwhile_leaves_no_thread(
    three: tuple[Agent, Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, owner, _ = three
    monkeypatch.setattr(holds, "LEASE_S", 0.2)

    def ask() -> None:
        with contextlib.suppress(RpcError):
            maker.peer("owner").actor(handlers.blocked, "act")

    thread = threading.Thread(target=ask)
    thread.start()
    handlers.wait_for("act runs")
    before = owner.stats()["threads"]
    maker.close(0.5, graceful=False)
    thread.join()
    become([], owner.leaks)
    handlers.note("act")
    become(0, lambda: owner.stats()["handled"])
    become(before, lambda: owner.stats()["threads"])


def test_the_ledger_refuses_to_make_what_was_called_off() -> None:
    objects = ObjectTable(lambda mailbox: None)
    early = objects.hold("maker/1", "user")
    objects.cancel_creation("maker/1", CallCancelled, "it was cancelled")
    for value in (early.value, objects.hold("maker/1", "another").value):
        with pytest.raises(CallCancelled, match="it was cancelled"):
            value.wait()
    with pytest.raises(CallCancelled, match="it was cancelled"):
        objects.begin("maker/1", "maker", "Table")
    assert not objects.held()
    begun = objects.begin("maker/2", "maker", "Table")
    objects.cancel_creation("maker/2", CallCancelled, "it was cancelled")
    assert not begun.value.done(), "it is being made: how that ends, its maker says"
