"""Values that can be sent and not be rebuilt: errors name the call, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.errors import RemoteError, RpcError, UsageError
from shoal.rpc import Agent, RRef, current
from shoal.rpc.calls import call
from shoal.testing import Agents
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.rpc.test_references import become


class Unbuildable(Exception):
    """It can be pickled, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return fall_apart, ()


def fall_apart() -> Any:
    raise LookupError("it falls apart")


def with_reference() -> tuple[Any, ...]:
    return RRef(1, current().agent), Unbuildable()


def raise_unbuildable() -> None:
    raise Unbuildable("on purpose")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Agent, Agent]]:
    with Agents() as stage:
        yield stage.join("a", timeout=PATIENCE), stage.join("b", timeout=PATIENCE)


def test_a_result_that_cannot_be_rebuilt_names_its_call(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    peer = a.peer("b")
    for future, name in (
        (peer.call(Unbuildable), r"tests\.rpc\.test_rebuilding\.Unbuildable"),
        (peer.remote(Unbuildable)._value(), "a copy of an object"),
        (peer.actor(Holder).give(), "method give of an object"),
    ):
        with pytest.raises(
            RpcError, match=rf"worker 'a': {name} at 'b' has a result that cannot be .*: it falls apart"
        ) as caught:
            future.wait()
        assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(RpcError, match=r"worker 'a': a copy of an object at 'b' has a result that"):
        peer.remote(Unbuildable).to_here()
    assert peer.call(handlers.echo, 1).wait() == 1
    become(([], {}), lambda: (b.leaks(), b.references._pinned))


class Holder:
    def give(self) -> Any:
        return Unbuildable()


def test_the_references_of_a_result_that_cannot_be_rebuilt_end(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    with pytest.raises(RpcError, match="falls apart"):
        a.peer("b").call(with_reference).wait()
    become(([], {}), lambda: (b.leaks(), b.references._pinned))


def test_arguments_that_cannot_be_rebuilt_name_their_call(pair: tuple[Agent, Agent]) -> None:
    peer = pair[0].peer("b")
    for _ in range(2):  # the second time the function goes by its number
        with pytest.raises(
            RpcError, match=r"a call from 'a' cannot be rebuilt at 'b': LookupError: it falls apart"
        ) as caught:
            peer.call(handlers.echo, Unbuildable()).wait()
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteError)
        assert "worker 'a': tests.rpc.handlers.echo at 'b' raised at 'b'" in str(cause)
        assert "LookupError" in cause.traceback
        peer.call(handlers.echo, 1).wait()


def test_an_exception_that_cannot_be_rebuilt_is_told_in_words(pair: tuple[Agent, Agent]) -> None:
    with pytest.raises(RemoteError, match=r"on purpose(.|\n)*cannot be rebuilt here: LookupError: it falls"):
        pair[0].peer("b").call(raise_unbuildable).wait()


def test_a_result_that_an_interrupt_cut_off_is_rebuilt_again(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, cut = call.decode, []

    def interrupted(*args: Any) -> Any:
        if not cut:
            cut.append(True)
            raise KeyboardInterrupt
        return decode(*args)

    peer = pair[0].peer("b")
    peer.call(handlers.echo, [1]).wait()
    future = peer.call(handlers.echo, [1])
    monkeypatch.setattr(call, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert future.wait() == [1]


class NoRoom:
    """An endpoint whose letters have no room."""

    def __init__(self, post: Any) -> None:
        self._post = post

    def __getattr__(self, name: str) -> Any:
        return getattr(self._post, name)

    def request(self, *_: Any) -> Any:
        raise ValueError("the head of a packet has at most 4 GiB")

    post = request


def test_what_no_letter_can_hold_is_refused_by_name(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    peer = a.peer("b")
    monkeypatch.setattr(a.endpoint, "post", NoRoom(a.endpoint.post))
    for use in (peer.call, peer.post, peer.remote):
        with pytest.raises(UsageError, match=r"handlers.echo at 'b' cannot be sent: the head of a packet"):
            use(handlers.echo, 1)
    monkeypatch.undo()
    become([], b.leaks)


def test_a_name_that_no_worker_can_have_is_refused_by_whom_was_asked(pair: tuple[Agent, Agent]) -> None:
    a, _ = pair
    for ask in (lambda: a.peer("\udce9"), lambda: a.wait("\udce9"), lambda: a.barrier(["a", "\udce9"])):
        with pytest.raises(UsageError, match="worker 'a': "):
            ask()
