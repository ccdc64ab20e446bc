"""Large parts between workers of one host: the receiver's tensors lie in memory that the sender lends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from shoal._core import RpcEndpoint
from shoal.errors import RpcError, WorkerLost
from shoal.rpc import Agent
from shoal.rpc.calls.call import reads_arguments
from shoal.rpc.connection.endpoint import Endpoint
from shoal.testing import Agents, faults, no_leaks
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.rpc.test_standstills import hold_gil

#: elements of float32; a lent part is longer than 256 KiB
LARGE = 100_000


@pytest.fixture(autouse=True)
def _nothing_noted() -> Iterator[None]:
    yield
    handlers.noted.clear()  # of what was lent


def lent(agent: Agent) -> int:
    return agent.stats()["lent"]


def becomes(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def keep(key: str, x: torch.Tensor) -> None:
    handlers.note(key, x)


def kept_sum(key: str) -> float:
    return float(handlers.noted[key].sum())


def drop(key: str) -> None:
    del handlers.noted[key]


def made(value: float) -> torch.Tensor:
    return torch.full((LARGE,), value)


def views(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the two share memory, and may be written to."""
    x += 1
    return bool(y[0] == 2)


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_an_argument_may_be_changed_when_its_memory_is_no_longer_read(
    meeting: Agents, a: Agent, host: str
) -> None:
    meeting.join("b", **({} if host == "here" else {"host_id": host}))
    b, x = a.peer("b"), torch.ones(32 * LARGE)
    for value in range(1, 4):
        x.fill_(value)
        future = b.call(torch.sum, x)
        if host == "here":
            assert not reads_arguments(future)  # it was lent, which takes a copy
        while reads_arguments(future):
            time.sleep(0.0001)
        x.zero_()
        assert future.wait() == value * x.numel()
        assert not reads_arguments(future)


def test_what_is_lent_is_the_receivers_own_and_returns(meeting: Agents, a: Agent) -> None:
    meeting.join("b")
    b, x = a.peer("b"), torch.ones(LARGE)
    assert b.call(views, x, x.view(10, -1)[0]).wait()
    assert x.sum() == LARGE  # the sender's memory is another
    y = b.call(handlers.echo, x).wait()
    y += 1
    assert lent(meeting.join("c")) == 0
    assert b.call(torch.sum, y).wait() == 2 * LARGE
    assert x.sum() == LARGE
    for value in range(100):
        assert b.call(torch.sum, torch.full((LARGE,), float(value))).wait() == value * LARGE
    becomes(lambda: lent(a) == 0)


def test_a_result_outlives_the_worker_that_lent_it(meeting: Agents, a: Agent) -> None:
    meeting.start("b")
    x = a.peer("b").call(made, 3.0).wait()
    meeting.kill("b")
    meeting.outcome("b")
    x += 1
    assert x.sum() == 4 * LARGE


def test_a_dead_worker_returns_what_was_lent_to_it(meeting: Agents, a: Agent) -> None:
    meeting.start("b")
    b = a.peer("b")
    b.call(keep, "x", torch.ones(LARGE)).wait()
    assert lent(a) > 4 * LARGE
    meeting.kill("b")
    becomes(lambda: lent(a) == 0)


def test_a_worker_that_is_cut_off_keeps_what_it_has(meeting: Agents, a: Agent) -> None:
    meeting.join("b", timeout=PATIENCE)
    b = a.peer("b")
    b.call(keep, "x", torch.ones(LARGE)).wait()
    before = lent(a)
    a.endpoint.post.disconnect(a.connection("b", PATIENCE).number)
    becomes(lambda: not a.connections.is_connected(b._agent.directory.look("b").incarnation))  # type: ignore[union-attr]
    for _ in range(10):
        assert b.call(torch.sum, torch.zeros(LARGE)).wait() == 0
    assert b.call(kept_sum, "x").wait() == LARGE
    assert lent(a) >= before
    b.call(drop, "x").wait()
    becomes(lambda: lent(a) == 0)


def test_a_worker_that_keeps_all_it_receives_has_at_most_half_of_what_can_be_lent(meeting: Agents) -> None:
    a = meeting.join("a", timeout=PATIENCE, memory=4 << 20)
    meeting.join("b", timeout=PATIENCE)
    b = a.peer("b")
    for index in range(20):
        b.call(keep, f"{index}", torch.full((LARGE,), float(index))).wait()
    becomes(lambda: 1 << 20 < lent(a) <= 2 << 20)
    for index in range(20):
        assert b.call(kept_sum, f"{index}").wait() == index * LARGE
    huge = torch.ones(2_000_000)
    assert b.call(torch.sum, huge).wait() == len(huge)
    for index in range(20):
        b.call(drop, f"{index}").wait()
    becomes(lambda: lent(a) == 0)


def test_parts_take_the_socket_while_nothing_can_be_lent(meeting: Agents) -> None:
    a = meeting.join("a", timeout=PATIENCE, memory=4 << 20)
    meeting.join("b", timeout=PATIENCE)
    reserved = [a.endpoint.post.buffer(4 * LARGE) for _ in range(9)]
    assert lent(a) > 3 << 20
    for value in range(5):
        x = torch.full((2 * LARGE,), float(value))
        assert a.peer("b").call(torch.sum, x).wait() == 2 * LARGE * value
    del reserved
    becomes(lambda: lent(a) == 0)


def test_a_reserved_part_is_lent_as_it_is_and_only_once(meeting: Agents, a: Agent) -> None:
    meeting.join("b")
    b = a.peer("b")
    x = torch.frombuffer(a.endpoint.post.buffer(4 * LARGE), dtype=torch.float32)
    x.fill_(1)
    one = lent(a)
    assert one > 0
    b.call(keep, "x", x).wait()
    assert lent(a) == one
    x += 1
    assert b.call(kept_sum, "x").wait() == 2 * LARGE  # it belongs to the receiver, but it is the same memory
    b.call(keep, "y", x).wait()
    assert lent(a) > one  # the second receiver has a copy
    x.zero_()
    assert b.call(kept_sum, "y").wait() == 2 * LARGE
    b.call(drop, "x").wait()
    x += 3
    for _ in range(20):
        assert b.call(torch.sum, torch.zeros(LARGE)).wait() == 0
    assert b.call(torch.sum, x[LARGE // 2 :]).wait() == 3 * LARGE // 2  # a part of it is copied
    assert x.sum() == 3 * LARGE
    b.call(keep, "x", x).wait()  # it has returned, and can be lent again
    del x
    assert b.call(kept_sum, "x").wait() == 3 * LARGE
    b.call(drop, "x").wait()
    b.call(drop, "y").wait()
    becomes(lambda: lent(a) == 0)


def test_a_reply_that_nobody_wants_returns(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b")
    future = a.peer("b").call(handlers.wait_for, "x")
    a.peer("b").call(handlers.pid).wait()
    future.cancel()
    for _ in range(20):
        late = a.peer("b").call(made, 1.0)
        late.cancel()
    a.peer("b").call(handlers.pid).wait()
    handlers.note("x", torch.ones(LARGE))
    becomes(lambda: b.stats()["handled"] == 0 and lent(b) == 0)


def test_a_forked_child_has_a_copy_of_what_its_parent_received(meeting: Agents, a: Agent) -> None:
    lender = meeting.join("b", timeout=PATIENCE)
    b = a.peer("b")
    x, y = (b.call(made, value).wait() for value in (5.0, 6.0))
    ends = [os.pipe() for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            y += 1
            os.write(ends[1][1], b"!")
            os.close(ends[0][1])
            os.read(ends[0][0], 1)  # until the parent has let go of its own and had others
            code = int(x.sum() != 5 * LARGE or y.sum() != 7 * LARGE)
            del x, y
        finally:
            os._exit(code)
    x += 10
    os.read(ends[1][0], 1)
    assert x.sum() == 15 * LARGE
    assert y.sum() == 6 * LARGE
    del x, y
    becomes(lambda: lent(lender) == 0)  # also what was held at the fork has returned
    for _ in range(5):
        z = b.call(made, 7.0).wait()
        z += 1
        assert z.sum() == 8 * LARGE
    for each in (0, 1):
        os.close(ends[0][1 - each])
        os.close(ends[1][each])
    assert os.waitpid(pid, 0)[1] == 0


def test_no_write_is_lost_in_a_fork(meeting: Agents, a: Agent) -> None:
    meeting.join("b", timeout=PATIENCE)
    x = a.peer("b").call(made, 0.0).wait()
    count, ended = 0, False

    def add() -> None:
        nonlocal count
        while not ended:
            x.add_(1)  # without the GIL
            count += 1

    thread = threading.Thread(target=add)
    thread.start()
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    ended = True
    thread.join()
    assert count > 0
    assert torch.equal(x, torch.full((LARGE,), float(count)))


def test_what_is_on_its_way_outlives_an_agent_that_leaves() -> None:
    a, b = (Endpoint(name, 1 << 20, 30.0) for name in "ab")
    x = torch.arange(LARGE, dtype=torch.float32)
    begin, left = socket.socketpair()
    right, end = socket.socketpair()
    with left, right:
        peer = a.attach(begin.detach(), os.getpid(), lambda: None, b.memory())
        b.attach(end.detach(), os.getpid(), lambda: None, a.memory())
        a.post.post(peer, 0, b"head", [(x.data_ptr(), 4 * LARGE)], x, PATIENCE)
        a.close(1.0)
        left.settimeout(PATIENCE)
        while data := left.recv(1 << 20):
            assert len(data) < 4 * LARGE
            right.sendall(data)
        letters = b.post.take(0, PATIENCE, 1)
        assert letters is not None
        (message,) = letters
        assert torch.equal(torch.frombuffer(message.parts[0], dtype=torch.float32), x)
    b.close(0.0)


@pytest.mark.parametrize("how", ["stopped", "without Python"])
def test_others_are_lent_to_while_one_lets_nothing_go(meeting: Agents, how: str) -> None:
    a = meeting.join("a", timeout=PATIENCE, memory=4 << 20)
    pid = meeting.start("b")
    meeting.join("c", timeout=PATIENCE)
    b, c, x = a.peer("b"), a.peer("c"), torch.ones(LARGE)
    b.call(keep, "x", x).wait()
    if how == "stopped":
        faults.stop(pid)
    else:
        held = b.call(hold_gil, 1.0)
    pending = [b.call(torch.sum, x) for _ in range(20)]  # more than fits
    for value in range(20):
        assert c.call(torch.sum, torch.full((LARGE,), float(value))).wait() == value * LARGE
        assert lent(a) <= 4 << 20
    if how == "stopped":
        faults.resume(pid)
    else:
        held.wait()
    assert [future.wait() for future in pending] == [LARGE] * 20
    assert b.call(kept_sum, "x").wait() == LARGE
    b.call(drop, "x").wait()
    becomes(lambda: lent(a) == 0)


def test_what_a_worker_lent_and_was_lent_returns_when_it_is_killed_between() -> None:
    came: list[torch.Tensor] = []

    def exchange(a: Agent) -> None:
        try:
            while True:
                came.append(a.peer("b").call(handlers.echo, torch.ones(10 * LARGE)).wait())
                del came[:-3]
        except RpcError:  # it is lost, or cannot be connected to any more
            return

    def use() -> None:
        with Agents() as meeting:
            a = meeting.join("a", timeout=PATIENCE)
            meeting.start("b")
            a.peer("b").call(handlers.pid).wait()
            threads = [threading.Thread(target=exchange, args=(a,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            becomes(lambda: len(came) > 0)
            meeting.kill("b")
            for thread in threads:
                thread.join()
            assert all(bool((x == 1).all()) for x in came)
            came.clear()
            becomes(lambda: lent(a) == 0)

    use()
    with no_leaks():
        for _ in range(3):
            use()


def test_memory_that_could_be_cut_is_refused() -> None:
    with no_leaks():
        post = RpcEndpoint.make(1 << 20, 10.0)
        unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, 1 << 20)
        for memory in (unsealed, os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)):
            ends = socket.socketpair()
            with ends[1], pytest.raises(ConnectionError, match="memfd"):
                post.attach(ends[0].detach(), os.getpid(), 1, memory)
        post.close(1.0)


def test_nothing_of_lent_memory_is_left_behind() -> None:
    def use() -> None:
        handlers.noted.clear()
        with Agents() as meeting:
            a = meeting.join("a", timeout=PATIENCE)
            meeting.join("b", timeout=PATIENCE)
            pid = meeting.start("c")
            x = a.peer("b").call(handlers.echo, torch.ones(LARGE)).wait()
            a.peer("c").call(keep, "x", x).wait()
            meeting.kill("c")
            with pytest.raises(WorkerLost, match=f"process {pid}"):
                a.peer("c").call(handlers.wait_for, "y").wait()

    use()  # what stays for ever comes with the first use
    with no_leaks():
        use()


def test_reserved_memory_that_was_not_sent_returns_to_the_system() -> None:
    with no_leaks():
        a = Endpoint("a", 64 << 20, 30.0)
        memory = a.memory()
        part = torch.frombuffer(a.post.buffer(16 << 20), dtype=torch.uint8)
        part.fill_(1)
        assert os.fstat(memory).st_blocks * 512 > 16 << 20
        del part
        becomes(lambda: os.fstat(memory).st_blocks * 512 < 1 << 20)
        os.close(memory)
        a.close(0.0)


@pytest.mark.parametrize("closed", [False, True])
def test_a_forked_child_may_drop_reserved_memory(closed: bool) -> None:
    a = Endpoint("a", 64 << 20, 30.0)
    part = torch.frombuffer(a.post.buffer(1 << 20), dtype=torch.uint8)
    if closed:
        a.close(0.0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            others = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(8)]  # where the memory was
            del part
            code = int(any(int(x.sum()) != 16 << 20 for x in others))
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    del part
    a.close(0.0)


def test_forks_without_the_gil_and_new_connections_do_not_wait_for_each_other() -> None:
    """In a process of its own, because a child of such a fork is a copy of this one in any state."""
    program = """
import ctypes, os, socket, threading, time
from shoal.rpc.connection.endpoint import Endpoint

a, ended = Endpoint("a", 1 << 20, 30.0), False

def connect():
    while not ended:
        b = Endpoint("b", 1 << 20, 30.0)
        begin, end = socket.socketpair()
        with end:
            a.attach(begin.detach(), os.getpid(), lambda: None, b.memory())
        b.close(0.0)

thread = threading.Thread(target=connect)
thread.start()
libc = ctypes.CDLL(None)
until = time.monotonic() + 2
while time.monotonic() < until:
    pid = libc.fork()
    if pid > 0:  # the child may wait for the GIL forever
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    else:
        os._exit(0)
ended = True
thread.join()
a.close(0.0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)
