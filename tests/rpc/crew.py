"""Workers of which some are killed: what they do until then, and what the others have left of them.

``a`` is an agent of the test's process; ``b`` and ``c`` are processes that live as long as the crew.  Each
trial has a victim of its own, which joins while the trial before it runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from shoal.errors import AgentClosed, RpcError, WorkerLost
from shoal.future import Future
from shoal.rpc import Agent, Peer, RRef, current, executor
from shoal.rpc.calls import call, holds
from shoal.store.tcp import client as tcp
from shoal.testing import Agents
from shoal.testing.leaks import inventory
from tests.rpc.handlers import PATIENCE

#: the module; ``shoal.future.pool`` is also the name of the pool
pool: Any = importlib.import_module("shoal.future.pool")
#: seconds that the holds of a dead worker last here: longer than others need to take up what it passed on
LEASE_S = 6.0
#: elements of a transfer that a signal can meet in the middle
LARGE = 4_000_000
SURVIVORS = ("a", "b", "c")

kept: list[Any] = []


class Thing:
    """An object that stays with a worker."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value


def hasten(
    lease: float = LEASE_S,
    call_lease: float = LEASE_S,
    idle: float = 0.05,
    pool_idle: float = 0.05,
    kept: int = 1,
) -> None:
    """Let what waits for its end in this process wait for less, and keep fewer connections to the store."""
    holds.LEASE_S, call.LEASE_S = lease, call_lease
    executor.IDLE_TIMEOUT_S, pool.IDLE_TIMEOUT_S = idle, pool_idle
    tcp._MAX_IDLE_CONNECTIONS = kept


class Crew(Agents):
    """A store, three workers that live, and victims."""

    def __init__(self) -> None:
        self._was = (
            holds.LEASE_S,
            call.LEASE_S,
            executor.IDLE_TIMEOUT_S,
            pool.IDLE_TIMEOUT_S,
            tcp._MAX_IDLE_CONNECTIONS,
        )
        hasten()
        super().__init__()
        self._victims = 0
        self._spare: tuple[str, dict[str, Any]] | None = None
        for name in "bc":
            self.start(name, prepare=hasten, timeout=PATIENCE)
        self.a = self.join("a", timeout=PATIENCE)
        self.peers = {name: self.a.peer(name) for name in SURVIVORS}
        for name in SURVIVORS:  # each has a connection to each from now on, and a loop
            self.ask(name, meet, SURVIVORS)

    def close(self, *, graceful: bool = False) -> None:
        super().close(graceful=graceful)
        hasten(*self._was)

    def ask(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
        """What ``fn`` gives at a survivor."""
        return self.peers[name].call(fn, *args).wait()

    def victim(self) -> str:
        """The next worker to be killed, which lives; its name is that of a dead one."""
        if self._spare is None:
            self.start_spare()
        assert self._spare is not None
        name, self._spare = self._spare[0], None
        return name

    def start_spare(self) -> None:
        """Start the next victim."""
        self._victims += 1
        name = f"v{self._victims % 2}"
        how: dict[str, Any] = {"host_id": "elsewhere"} if self._victims % 4 > 1 else {}
        self.start(name, prepare=hasten, timeout=PATIENCE, **how)
        self._spare = name, how

    def kill_at(self, name: str) -> float:
        """Kill a worker; the moment of it."""
        at = time.monotonic()
        self.kill(name)
        return at

    def describe_held(self) -> dict[str, dict[str, Any]]:
        """What each survivor has, of itself and of others."""
        return {name: self.ask(name, describe_held) for name in SURVIVORS}

    def settle(self, before: dict[str, Counter[str]] | None = None) -> dict[str, Counter[str]]:
        """Wait until all survivors have nothing of anybody's, and no more than ``before``; what they have."""
        end = time.monotonic() + PATIENCE
        while True:
            more, found = {}, {}
            for name in SURVIVORS:
                theirs, found[name] = self.ask(name, describe_held)
                theirs += found[name] - before[name] if before else Counter()
                if theirs:
                    more[name] = dict(theirs)
            if not more:
                return found
            assert time.monotonic() < end, f"left: {more}"
            time.sleep(0.2)  # asking more often would keep threads that end when they are idle


# -- what the survivors have ---------------------------------------------------------------------------


def describe_held() -> tuple[Counter[str], Counter[str]]:
    """What this worker has only because of others, and what it has in any case."""
    agent = current().agent
    kept.clear()  # a victim's last messages may have come after the trial
    gc.collect()
    stats, references = agent.stats(), agent.references
    stats["calls"] -= agent.name == "a"  # this one
    stats["handled"] -= 1
    theirs = Counter(
        {
            **{each: stats[each] for each in ("calls", "handled", "letters", "queued", "granted", "lent")},
            "references": len(references._held),
            "pinned": len(references._pinned),
            "leases": len(references._losses),
        }
    )
    theirs.update(agent.leaks())
    own = Counter(re.sub(r"\d+", "N", re.sub(r"\(.*|memfd:", "", each)) for each in inventory())
    return theirs, own + Counter(peers=stats["peers"])


# -- what workers do -----------------------------------------------------------------------------------


def outcome(future: Future[Any]) -> tuple[str, str, float]:
    """How a call ended: the error's type, the worker that it names, and when."""
    try:
        future.wait(PATIENCE)
    except Exception as error:
        return type(error).__name__, getattr(error, "worker", ""), time.monotonic()
    return "", "", time.monotonic()


def suffer(name: str, key: str) -> list[tuple[str, str, float]]:
    """Call a worker that will die; how the calls ended."""
    from tests.rpc import handlers

    peer: Peer = current().agent.peer(name)
    futures = [peer.call(handlers.wait_for, key) for _ in range(3)]
    note_reached(key)
    return [outcome(each) for each in futures]


def note_reached(key: str) -> None:
    """Tell ``a`` that this worker is where the trial wants it."""
    from tests.rpc import handlers

    current().agent.peer("a").call(handlers.note, f"{current().agent.name} {key}").wait()


def call_until_closed(seed: int) -> None:
    with contextlib.suppress(AgentClosed):
        call_on_and_on(seed)


def call_on_and_on(seed: int) -> None:
    """Call the survivors until somebody kills this worker."""
    from tests.rpc import handlers

    agent: Agent = current().agent
    choose = random.Random(seed)
    peers = [agent.peer(name) for name in SURVIVORS]
    futures: list[Any] = []
    while True:
        peer = choose.choice(peers)
        kind = choose.randrange(4)
        if kind == 0:
            futures.append(peer.call(handlers.echo, torch.ones(choose.choice((1, 5_000, 100_000)))))
        elif kind == 1:
            futures.append(peer.call(time.sleep, 0.002))
        elif kind == 2:
            peer.post(handlers.echo, 1)
        else:
            futures.append(peer.call(echo_later, 1))
        while len(futures) > 20:
            futures.pop(0).wait()


def meet(names: tuple[str, ...]) -> None:
    for name in names:
        assert current().agent.peer(name).call(echo_later, 1).wait() == 1


async def echo_later(value: Any) -> Any:
    import asyncio

    await asyncio.sleep(0.001)
    return value


def hold_on_and_on(seed: int) -> None:
    """Make objects at the survivors, keep some and let some go."""
    agent: Agent = current().agent
    choose = random.Random(seed)
    peers = [agent.peer(name) for name in SURVIVORS]
    while True:
        peer = choose.choice(peers)
        ref = peer.remote(Thing, 1) if choose.random() < 0.8 else peer.call(own, 1).wait()
        if choose.random() < 0.3:
            assert ref.rpc_sync().get() == 1
        if choose.random() < 0.3:
            peer.actor(Thing, 1).get()
        kept.append(ref)
        if len(kept) > 5:
            del kept[choose.randrange(len(kept))]


def own(value: int) -> RRef[Thing]:
    """A reference to an object of this worker."""
    return RRef(Thing(value), current().agent)


def forward_on_and_on(seed: int) -> None:
    """Make objects at one survivor, and pass them to another, which keeps some of them."""
    agent: Agent = current().agent
    choose = random.Random(seed)
    futures: list[Any] = []
    for number in range(1_000_000):
        owner, user = (agent.peer(name) for name in choose.sample(SURVIVORS, 2))
        ref = owner.remote(Thing, number)
        if choose.random() < 0.5:
            futures.append(user.call(keep, ref, number))
        else:
            user.post(keep, ref, number)
        del ref
        while len(futures) > 5:
            futures.pop(0).wait()


def keep(ref: RRef[Thing], number: int) -> None:
    kept.append((ref, number))
    if len(kept) > 10:
        del kept[0]


def use_kept() -> list[str]:
    """Use what was passed on, and let go of it; what went wrong."""
    wrong = []
    for ref, number in list(kept):
        try:
            value = ref.rpc_sync().get()
        except RpcError as error:
            wrong.append(repr(error))
            continue
        if value != number:
            wrong.append(f"{value} instead of {number}")
    kept.clear()
    return wrong


def use_lost(name: str) -> list[str]:
    """Use objects whose owner is dead, and let go of them; what went wrong.

    What an earlier victim passed on may have come since, and belongs to another owner.
    """
    wrong = []
    theirs = [ref for ref, _ in kept if ref.owner_name() == name]
    if not theirs:
        wrong.append(f"nothing of {name} was kept")
    for ref in theirs:
        try:
            ref.rpc_sync().get()
        except WorkerLost as error:
            if error.worker != name:
                wrong.append(f"{error!r} names {error.worker!r}")
        except Exception as error:
            wrong.append(repr(error))
        else:
            wrong.append("an object outlived its owner")
    kept.clear()
    return wrong


def send_on_and_on(to: str) -> None:
    """Send large arguments."""
    peer = current().agent.peer(to)
    x = torch.ones(LARGE)
    while True:
        peer.call(elements, x, x[1:]).wait()


def receive_on_and_on(name: str, key: str) -> tuple[str, str, float]:
    """Fetch large results from a worker until it dies."""
    peer = current().agent.peer(name)
    note_reached(key)
    while True:
        ended = outcome(peer.call(torch.ones, LARGE))
        if ended[0]:
            return ended


def send_until_lost(name: str, key: str) -> tuple[str, str, float]:
    """Send large arguments to a worker until it dies."""
    peer = current().agent.peer(name)
    note_reached(key)
    x = torch.ones(LARGE)
    while True:
        ended = outcome(peer.call(elements, x))
        if ended[0]:
            return ended


def elements(*xs: torch.Tensor) -> int:
    return sum(x.numel() for x in xs)


def come_to_barrier(names: list[str]) -> tuple[str, str, float]:
    """Come to a barrier; how it ended."""
    try:
        current().agent.barrier(names)
    except Exception as error:
        return type(error).__name__, getattr(error, "worker", ""), time.monotonic()
    return "", "", time.monotonic()


class Pulse:
    """Calls between the living, which must go on whatever becomes of others."""

    def __init__(self, crew: Crew) -> None:
        self.wrong: list[str] = []
        self.beats = 0
        self._crew = crew
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def _beat(self) -> None:
        peers = [self._crew.peers[name] for name in "bc"]
        others = {"b": "c", "c": "b"}
        while not self._ended.wait(0.01):
            try:
                for each in [peer.call(reach, others[peer.name]) for peer in peers]:
                    assert each.wait() == 7
            except Exception as error:
                self.wrong.append(repr(error))
                return
            self.beats += 1

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def reach(name: str) -> int:
    """Call on to another worker."""
    from tests.rpc import handlers

    result: int = current().agent.peer(name).call(handlers.echo, 7).wait()
    return result
