"""Workers that come and go by the thousand: what they leave with those that stay is bounded."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from itertools import pairwise

import psutil
import pytest
import torch

from shoal.rpc import Agent, RRef, current, join
from shoal.rpc.calls import call, holds, objects
from shoal.rpc.connection import manager
from shoal.rpc.connection import meeting as meeting_module
from shoal.store.tcp import replies
from shoal.testing import Agents
from tests.rpc import handlers
from tests.rpc.crew import Thing
from tests.rpc.handlers import PATIENCE
from tests.support.waiting import until

#: workers in each of four rounds
MANY = 50 if os.environ.get("STRESS") == "short" else 500


@pytest.fixture(autouse=True)
def _short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of the dead is soon as much as it ever gets."""
    for module in (holds, call):
        monkeypatch.setattr(module, "LEASE_S", 0.1)
    monkeypatch.setattr(manager, "_MAX_LOST_CONNECTIONS", 2)
    monkeypatch.setattr(meeting_module, "_PRUNE_COUNTS_FROM", 2)
    monkeypatch.setattr(objects, "_MAX_RELEASED", 2)
    monkeypatch.setattr(replies, "CHANNEL_TTL_S", 0.1)


def kept(agent: Agent) -> Counter[str]:
    """How many things each container of an agent's has."""
    parts = (
        agent,
        agent.connections,
        agent.references,
        agent.references.objects,
        agent.endpoint,
        agent.executor,
    )
    return Counter(
        {
            f"{type(part).__name__}.{name}": len(value)
            for part in (*parts, agent._barriers)
            for name, value in vars(part).items()
            if hasattr(value, "__len__") and not isinstance(value, (str, bytes))
        }
    )


def visit(meeting: Agents, a: Agent, name: str) -> None:
    """Be a worker for a moment, which does what workers do; ``a`` keeps a reference until it has gone."""
    with join(name, url=meeting.url, secret=meeting.secret, timeout=PATIENCE) as worker:
        there, back = a.peer(name), worker.peer("a")
        assert there.call(handlers.async_double, torch.ones(3)).wait().tolist() == [2, 2, 2]
        assert back.call(handlers.async_double, 2).wait() == 4
        back.post(handlers.async_double, 2)
        outlives = there.remote(Thing, 1)
        assert outlives.rpc_sync().get() == 1
        mine = back.remote(Thing, 2)
        assert (back.call(get, mine).wait(), there.call(get, outlives).wait()) == (2, 1)
        assert back.actor(Thing, 3).get().wait() == 3
        assert back.call(own).wait().rpc_sync().get() == 4
        arrived = there.call(come, ["a", name])
        a.barrier(["a", name])
        arrived.wait()
    del outlives


def get(ref: RRef[Thing]) -> int:
    value: int = ref.rpc_sync().get()
    return value


def own() -> RRef[Thing]:
    return RRef(Thing(4), current().agent)


def come(names: list[str]) -> None:
    current().agent.barrier(names)


def settled(a: Agent) -> Counter[str]:
    """What ``a`` keeps when all leases are over."""

    def pending() -> tuple[object, ...]:  # its connection to itself has two ends
        return (
            a.references._losses,
            a.endpoint._timers,
            [peer.name for peer in a.peers()],
            a.stats()["peers"] > 2,
        )

    until(lambda: not any(pending()), pending)
    gc.collect()
    return kept(a)


def test_workers_that_have_gone_leave_nothing_with_those_that_stay(meeting: Agents, a: Agent) -> None:
    for number in range(5):
        visit(meeting, a, f"guest {number}")
    before = settled(a)
    for number in range(5, 15):
        visit(meeting, a, f"guest {number}")
    until(lambda: not settled(a) - before, lambda: str(settled(a) - before))
    assert meeting.store.list_keys("") == ["default/0/rpc/workers/name/a"]


@pytest.mark.stress
def test_thousands_of_workers_come_and_go_in_constant_memory(meeting: Agents, a: Agent) -> None:
    process, numbers = psutil.Process(), itertools.count()

    def come_and_go() -> tuple[int, int, int]:
        for number in itertools.islice(numbers, MANY):
            visit(meeting, a, f"guest {number}")
        settled(a)
        return process.num_fds(), len(gc.get_objects()), process.memory_info().rss

    rounds = [come_and_go() for _ in range(4)]
    print(f"descriptors, objects and bytes: {rounds}")
    assert rounds[-1][0] == rounds[0][0]
    # What is kept of each guest grows in every round; a cache that fills does so in one.
    count, size = (min(after[what] - before[what] for before, after in pairwise(rounds)) for what in (1, 2))
    assert count < MANY / 2  # one object of each guest would be MANY
    assert size < max(2_000 * MANY, 1_000_000)  # the allocator takes some at a time
