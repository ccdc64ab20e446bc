"""Workers that serve a few functions by name, and never unpickle anything."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal import Future
from shoal.errors import RemoteError, RpcError, UsageError
from shoal.rpc import Agent, RRef, async_execution, current
from shoal.rpc.codec import pickled as codec
from shoal.testing import Agents
from tests.rpc.handlers import PATIENCE
from tests.rpc.test_plain import mutated


def score(x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
    return {"score": x.sum() * scale, "caller": current().caller}


def fail(word: str) -> None:
    raise ValueError(word)


async def slowly(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


@async_execution
def later(x: int) -> Future[int]:
    future: Future[int] = Future()
    threading.Timer(0.01, future.set_result, [x]).start()
    return future


SERVE = {
    "score": score,
    "fail": fail,
    "slowly": slowly,
    "later": later,
    "bad": lambda: {1, 2},
    "echo": lambda x: x,
}


@pytest.fixture(scope="module", params=["same host", "TCP"])
def stage(request: pytest.FixtureRequest) -> Iterator[Agents]:
    """Workers ``a`` and ``r``, the restricted one."""
    with Agents() as stage:
        how = {"host_id": "elsewhere"} if request.param == "TCP" else {}
        stage.a = stage.join("a", timeout=PATIENCE)
        stage.r = stage.join("r", timeout=PATIENCE, serve=SERVE, **how)
        yield stage


@pytest.fixture
def a(stage: Any) -> Agent:
    return stage.a


@pytest.fixture(autouse=True)
def _no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle")

    monkeypatch.setattr(codec.pickle, "loads", refuse)


def test_a_function_is_called_by_its_name(a: Agent) -> None:
    r = a.peer("r")
    answer = r.call("score", torch.ones(100_000), scale=2.0).wait()
    assert answer["score"].item() == 200_000
    assert answer["caller"] == "a"
    assert [r.call(name, 4).wait() for name in ("slowly", "later")] == [5, 4]
    r.post("score", torch.ones(2))
    x = torch.arange(6).reshape(2, 3).T
    assert torch.equal(r.call("echo", [x]).wait()[0], x)


def test_an_exception_comes_as_text(a: Agent) -> None:
    with pytest.raises(
        RemoteError, match=r"worker 'a': 'fail' at 'r' raised at 'r' .*ValueError: a word"
    ) as caught:
        a.peer("r").call("fail", "a word").wait()
    assert caught.value.worker == "r"
    assert "in fail" in caught.value.traceback
    with pytest.raises(RemoteError, match="the result of 'bad' at 'r': a set cannot be"):
        a.peer("r").call("bad").wait()
    with pytest.raises(
        RemoteError, match=r"'r' does not serve 'scroe'; it serves 'score', 'fail', .* by name"
    ):
        a.peer("r").call("scroe").wait()


def test_functions_references_and_actors_are_refused_before_they_are_sent(a: Agent) -> None:
    r = a.peer("r")
    for use in (
        lambda: r.call(score, torch.ones(2)),
        lambda: r.call(lambda: 1),
        lambda: r.post(fail, "x"),
        lambda: r.remote(dict),
        lambda: r.actor(dict),
    ):
        with pytest.raises(UsageError, match=r"restricted worker: call it by a name"):
            use()
    for value in (RRef(1, a), r, score, {1: 2}):
        with pytest.raises(
            UsageError, match=r"cannot be sent to or from a restricted worker|keys other than str"
        ):
            r.call("echo", value)


def test_a_restricted_worker_calls_no_function_either(stage: Any, a: Agent) -> None:
    back = stage.r.peer("a")
    with pytest.raises(UsageError, match="restricted worker: call it by a name"):
        back.call(score, torch.ones(2))
    with pytest.raises(RemoteError, match="'a' does not serve 'score'; it serves nothing by name"):
        back.call("score", torch.ones(2)).wait()
    other = stage.join("other", timeout=PATIENCE, serve={})
    assert other.peer("r").call("echo", 3).wait() == 3
    plain = stage.join("plain", timeout=PATIENCE)
    with pytest.raises(UsageError, match="only a restricted worker"):
        a.peer("plain").call("echo", 3)
    plain.close()
    other.close()


@pytest.mark.parametrize("serve", [3, ["score"], {"score": 1}, {"": score}, {1: score}])
def test_what_cannot_be_served_is_refused(stage: Agents, serve: Any) -> None:
    with pytest.raises(UsageError, match=r"serve=.*: expected functions by the names"):
        stage.join("x", serve=serve)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_whatever_comes_is_answered_and_never_unpickled(stage: Any, a: Agent) -> None:
    """Letters of a caller that holds the secret and keeps to no rules, the caller's end being honest."""
    connection = a.connection("r", PATIENCE)
    letters = [mutated(seed) for seed in range(400)]
    letters += [(pickle.dumps(Evil()), []), (b"\0\0\0\0\1\0\0\0\0" + pickle.dumps((Evil(), (), {})), [])]
    calls = []
    for number, (head, parts) in enumerate(letters):
        tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
        memory = [(x.data_ptr(), x.numel()) for x in tensors]
        mailbox = 1 if number % 50 == 7 else 0
        calls.append(
            (a.endpoint.post.request(connection.number, mailbox, head, memory, tensors, PATIENCE), mailbox)
        )
    refused = 0
    for call, mailbox in calls:
        assert call.wait(PATIENCE)
        assert call.error() is None
        refused += call.reply().failed
        assert mailbox == 0 or refused
    assert refused > 200
    assert a.peer("r").call("echo", 1).wait() == 1


def test_a_reply_that_nobody_packed_is_an_error_at_the_caller(
    a: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies: list[tuple[bytes, bool]] = []
    heads = [b"", b"\xc1", b"\x91" * 5000, pickle.dumps(Evil())]

    def lie(self: Any, message: Any, failed: bool = False) -> None:
        service = self._service
        service._endpoint.post.reply(self._message, lies[-1][0], [], [], lies[-1][1], 1)

    monkeypatch.setattr("shoal.rpc.calls.serving._ServedCall._reply", lie)
    for head in heads:
        for failed in (False, True):
            lies.append((head, failed))
            with pytest.raises(RpcError, match=r"an invalid message of plain values|cannot be read"):
                a.peer("r").call("echo", 1).wait()
