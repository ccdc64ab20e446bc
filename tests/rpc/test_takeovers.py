"""The store that dies, and names that change hands."""

from __future__ import annotations

import threading
import time

import pytest

from shoal.errors import ShoalError, UsageError, WorkerLost
from shoal.rpc import Agent, current, join
from shoal.store import TCPStoreServer
from shoal.testing import Agents
from shoal.testing.processes import fork_server
from tests.rpc import crew, handlers
from tests.rpc.crew import Thing
from tests.rpc.handlers import PATIENCE


def serve_store(told: object) -> None:
    server = TCPStoreServer(secret=b"a secret").start()
    told.send(server.url)  # type: ignore[attr-defined]
    threading.Event().wait()


def test_calls_go_on_when_the_store_has_died() -> None:
    import multiprocessing

    handlers.noted.clear()
    receive, send = multiprocessing.Pipe(duplex=False)
    store = fork_server().Process(target=serve_store, args=(send,))
    store.start()
    send.close()
    url = receive.recv()
    receive.close()
    a, b = (join(name, url=url, secret="a secret", timeout=PATIENCE) for name in "ab")
    ref = a.peer("b").remote(Thing, 5)
    assert ref.rpc_sync().get() == 5
    lost: list[str] = []
    a.on_lost(lost.append)
    pending = a.peer("b").call(handlers.blocked, "go on")
    handlers.wait_for("go on runs")
    store.kill()
    store.join()
    store.close()
    a.peer("b").call(handlers.note, "go on", 3).wait()
    assert pending.wait() == 3
    assert ref.rpc_sync().get() == 5
    # What needs the store says so, soon.
    for use in (lambda: a.peer("c"), a.barrier, a.peers):
        with pytest.raises(ShoalError, match="store"):
            use()
    with pytest.raises(ShoalError, match="store"):
        b.peer("a").call(handlers.pid).wait()
    assert lost == []
    del ref
    began = time.monotonic()
    b.close(PATIENCE)
    a.close(PATIENCE)
    assert time.monotonic() - began < PATIENCE


def test_an_old_reference_never_reaches_a_new_process_of_the_name(meeting: Agents) -> None:
    a = meeting.join("a", timeout=PATIENCE)
    wrong: list[str] = []

    def use(ref: object, ended: threading.Event) -> None:
        while not ended.is_set():
            try:
                if ref.rpc_sync().get() != 1:  # type: ignore[attr-defined]
                    wrong.append("another object")
            except WorkerLost as error:
                if error.worker != "v":
                    wrong.append(repr(error))
            except Exception as error:
                wrong.append(repr(error))

    meeting.start("v", prepare=crew.hasten, timeout=PATIENCE)
    for _ in range(3):
        v = a.peer("v")
        pid = v.call(handlers.pid).wait()
        ref, ended = v.remote(Thing, 1), threading.Event()
        assert ref.rpc_sync().get() == 1
        users = [threading.Thread(target=use, args=(ref, ended)) for _ in range(3)]
        for each in users:
            each.start()
        meeting.kill("v")
        meeting.outcome("v")
        again = meeting.start("v", prepare=crew.hasten, timeout=PATIENCE)
        assert again != pid
        assert a.peer("v", timeout=PATIENCE).call(handlers.pid).wait() == again
        fresh = a.peer("v").remote(Thing, 2)
        assert fresh.rpc_sync().get() == 2
        ended.set()
        for each in users:
            each.join()
        with pytest.raises(WorkerLost, match="which owned an object, has ended"):
            ref.to_here()
        assert wrong == []


claimed: list[Agent] = []


def claim(url: str, secret: str, name: str) -> bool:
    """Join under a name; whether it was free."""
    current()
    try:
        claimed.append(join(name, url=url, secret=secret))
    except UsageError:
        return False
    return True


def leave_again() -> None:
    claimed.pop().close(graceful=False)


@pytest.mark.parametrize("races", [15, pytest.param(100, marks=pytest.mark.stress)])
def test_of_two_processes_that_claim_a_name_at_once_one_gets_it(meeting: Agents, races: int) -> None:
    for name in "bc":
        meeting.start(name, prepare=crew.hasten, timeout=PATIENCE)
    a = meeting.join("a", timeout=PATIENCE)
    peers = [a.peer(name) for name in "bc"]
    for _ in range(races):
        got = [
            future.wait()
            for future in [peer.call(claim, meeting.url, meeting.secret, "one") for peer in peers]
        ]
        assert sorted(got) == [False, True]
        winner = peers[got.index(True)]
        assert a.peer("one").call(handlers.pid).wait() == winner.call(handlers.pid).wait()
        winner.call(leave_again).wait()
