"""Workers that stand still and go on: they are late, and are not taken for dead."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Any

import pytest

from shoal.errors import CallTimeout, ForkedProcess, WorkerLost
from shoal.rpc import Agent, Peer, current
from shoal.testing import Agents, faults
from tests.failure.ranks import quiet_fork
from tests.rpc import handlers
from tests.rpc.crew import Thing
from tests.rpc.handlers import PATIENCE

FAR = {"host_id": "elsewhere"}
#: seconds of silence after which a worker of another host counts as lost
SILENCE = 4.0

far_and_near = pytest.mark.parametrize("how", [{}, FAR], ids=["same host", "TCP"])


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HEARTBEAT_TIMEOUT", str(SILENCE))


def start(meeting: Agents, a: Agent, how: dict[str, Any]) -> Peer:
    """``b``, which is connected."""
    env = {"SHOAL_HEARTBEAT_TIMEOUT": str(SILENCE)}
    meeting.start("b", env=env, timeout=PATIENCE, **how)
    b = a.peer("b")
    b.call(handlers.pid).wait()
    return b


@far_and_near
def test_who_stands_still_for_a_moment_answers_when_it_goes_on(
    meeting: Agents, a: Agent, how: dict[str, Any]
) -> None:
    b = start(meeting, a, how)
    connection = a.connection("b", PATIENCE)
    pid = meeting.pids["b"]
    for _ in range(5):
        faults.stop(pid)
        futures = [b.call(handlers.echo, i) for i in range(20)]
        time.sleep(0.1)
        assert not any(future.done() for future in futures)
        faults.resume(pid)
        assert [future.wait() for future in futures] == list(range(20))
    assert a.connection("b", PATIENCE) is connection


def test_who_stands_still_on_the_same_host_is_late_and_not_lost(meeting: Agents, a: Agent) -> None:
    b = start(meeting, a, {})
    connection, ref = a.connection("b", PATIENCE), b.remote(Thing, 3)
    assert ref.rpc_sync().get() == 3
    pid = meeting.pids["b"]
    faults.stop(pid)
    with pytest.raises(CallTimeout, match="its endpoint does not answer"):
        b.options(timeout=1.25 * SILENCE).call(handlers.echo, 1).wait()
    assert b.alive
    faults.resume(pid)
    assert b.call(handlers.echo, 1).wait() == 1
    assert ref.rpc_sync().get() == 3
    assert a.connection("b", PATIENCE) is connection


def test_a_host_that_stands_still_for_too_long_is_lost_and_comes_again(meeting: Agents, a: Agent) -> None:
    b = start(meeting, a, FAR)
    ref = b.remote(Thing, 3)
    assert ref.rpc_sync().get() == 3
    pid = meeting.pids["b"]
    faults.stop(pid)
    with pytest.raises(WorkerLost, match="no message came from its host for") as caught:
        b.call(handlers.echo, 1).wait()
    assert caught.value.worker == "b"
    faults.resume(pid)
    # It is the same worker, on a new connection, and it has kept what others hold.
    assert b.call(handlers.pid).wait() == pid
    assert ref.rpc_sync().get() == 3


def hold_gil(seconds: float) -> None:
    """Let no other thread of this process run Python."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@far_and_near
@pytest.mark.parametrize(
    "seconds", [1.25 * SILENCE, pytest.param(15.0, marks=pytest.mark.stress)], ids=["5 s", "15 s"]
)
def test_a_worker_that_runs_no_python_lives(
    meeting: Agents, a: Agent, how: dict[str, Any], seconds: float
) -> None:
    b = start(meeting, a, how)
    connection = a.connection("b", PATIENCE)
    waiting = b.options(timeout=seconds + PATIENCE).call(handlers.blocked, "go on")
    held = b.options(timeout=seconds + PATIENCE).call(hold_gil, seconds)
    longest = 0.0
    while not held.done():
        began = time.monotonic()
        assert b.options(timeout=seconds + PATIENCE).call(handlers.echo, 1).wait() == 1
        longest = max(longest, time.monotonic() - began)
    held.wait()
    assert longest > seconds / 2, "it held nothing"
    b.call(handlers.note, "go on", 7).wait()
    assert waiting.wait() == 7
    assert a.connection("b", PATIENCE) is connection


def fork_and_use() -> list[str]:
    """Fork; what the child's use of the agent raises."""
    agent = current().agent
    peer = agent.peer("a")
    ref = peer.remote(Thing, 1)
    pending = peer.call(handlers.blocked, "forked")
    read, write = os.pipe()
    child = quiet_fork()
    if child == 0:
        wrong = []
        for use in (
            lambda: peer.call(handlers.pid).wait(),
            lambda: agent.peer("a"),
            ref.to_here,
            lambda: pending.wait(1),
        ):
            try:
                use()
            except Exception as error:
                wrong.append(type(error).__name__)
        del ref
        agent.close()
        os.write(write, " ".join(wrong).encode())
        os.close(write)
        time.sleep(60.0)  # longer than its parent lives
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    handlers.note("child", child)
    assert ref.rpc_sync().get() == 1
    return text.split()


@far_and_near
def test_a_forked_child_uses_nothing_and_hides_no_death(
    meeting: Agents, a: Agent, how: dict[str, Any]
) -> None:
    b = start(meeting, a, how)
    raised = b.call(fork_and_use).wait()
    child = b.call(handlers.recall, "child").wait()
    try:
        assert raised[:3] == [ForkedProcess.__name__] * 3
        assert len(raised) == 4
        assert b.call(handlers.echo, 1).wait() == 1
        pending = b.call(handlers.wait_for, "never")
        b.call(handlers.pid).wait()
        meeting.kill("b")
        with pytest.raises(WorkerLost, match="wait_for at 'b'"):
            pending.wait(PATIENCE)
        os.kill(child, 0)  # it outlives its parent
    finally:
        os.kill(child, signal.SIGKILL)
    handlers.note("forked")


@pytest.mark.parametrize("graceful", [True, False])
def test_what_a_worker_did_not_take_before_the_close_is_reported(
    meeting: Agents, a: Agent, caplog: pytest.LogCaptureFixture, graceful: bool
) -> None:
    b = start(meeting, a, {})
    assert b.call(handlers.echo, 1).wait() == 1
    meeting.stop("b")
    for _ in range(9):
        b.post(handlers.note, "late", bytes(1 << 20))
    words = "worker 'a': 'b' did not take all that was queued within the 0.5 s of close"
    with pytest.raises(CallTimeout, match=words) if graceful else contextlib.nullcontext():
        a.close(0.5, graceful=graceful)
    assert (words in caplog.text) is not graceful
    assert a.closed
    meeting.resume("b")


def test_a_close_sends_all_that_a_slow_worker_takes_in_time(meeting: Agents, a: Agent) -> None:
    b = start(meeting, a, {})
    assert b.call(handlers.echo, 1).wait() == 1
    meeting.stop("b")
    for _ in range(9):
        b.post(handlers.note, "late", bytes(1 << 20))
    meeting.resume("b")
    a.close()
    assert meeting.join("c", timeout=handlers.PATIENCE).peer("b").call(handlers.recall, "late").wait()
