"""Many calls with tensors of the pretended device, of which most come to grief."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from shoal.errors import CallTimeout, RpcError, WaitTimeout, WorkerLost
from shoal.future import Future
from shoal.rpc import Agent, Peer
from tests.rpc.device_handlers import Table, echo, kinds
from tests.support import pretend_device
from tests.support.fake_streams import FakeStream

PATIENCE = 30.0
#: makes a call whose copies are held, and gives the streams that hold them
HeldCall = Callable[[Callable[[], Any]], tuple[Any, list[FakeStream]]]


def storm(a: Agent, b: Peer, held_call: HeldCall) -> None:
    """Calls that are cancelled, late, cut off or whose device fails, at any stage of their way."""
    choose = random.Random(5)
    objects = {"actor": b.actor(Table), "other": b.remote(Table).rpc_async()}
    sizes = (1, 2_000, 100_000, 3_000_000)
    makes = (
        lambda peer, x: peer.call(echo, x),
        lambda peer, x: peer.post(kinds, x),
        lambda peer, x: objects["actor"].push(x[:1]),
        lambda peer, x: objects["actor"].push(1),
        lambda peer, x: objects["other"].push(x[:1]),
    )
    futures: list[Future[Any]] = []
    streams: list[FakeStream] = []
    for number in range(60):
        x = torch.ones(choose.choice(sizes)).to(pretend_device.DEVICE)
        peer = b.options(timeout=choose.choice((PATIENCE, PATIENCE, 0.001, 0.01)))
        make = choose.choice(makes)
        try:
            made, more = held_call(lambda make=make, peer=peer, x=x: make(peer, x))  # type: ignore[misc]
        except (WorkerLost, CallTimeout):
            continue  # a post that found no connection, or no room in time
        streams += more
        if made is not None:
            futures.append(made)
            if choose.random() < 0.2:
                made.cancel()
        for _ in range(min(len(streams), choose.choice((0, 2, 5)))):
            stream = streams.pop(choose.randrange(len(streams)))
            if choose.random() < 0.05:
                stream.fail(RuntimeError("it burnt"))
            stream.release()
        if number % 20 == 19 and (connection := a.connections.existing("b")) is not None:
            a.endpoint.post.disconnect(connection.number)
    for stream in streams:
        stream.release()
    kept = 0
    for future in futures:
        try:
            future.wait(PATIENCE)
        except WaitTimeout:
            raise
        except (RpcError, RuntimeError):
            continue
        kept += 1
    assert kept
    futures.clear()
    objects.clear()
