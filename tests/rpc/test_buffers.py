"""Large parts that come through a socket: the memory that they come into is kept for the next ones."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest
import torch

from shoal.rpc import Agent
from shoal.testing import Agents, no_leaks
from tests.failure.ranks import quiet_fork
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.support.waiting import until

MIB = 1 << 20


@pytest.fixture
def b(meeting: Agents) -> Iterator[Agent]:
    """A worker to which everything goes through a socket."""
    yield meeting.join("b", timeout=PATIENCE, memory=32 * MIB, host_id="elsewhere")
    handlers.noted.clear()


def kept(agent: Agent) -> int:
    return agent.stats()["kept"]


def bytes_of(mib: int, value: int) -> torch.Tensor:
    return torch.full((mib * MIB,), value, dtype=torch.uint8)


def test_a_buffer_that_was_let_go_of_takes_the_next_part(a: Agent, b: Agent) -> None:
    peer, x = a.peer("b"), bytes_of(8, 1)
    for _ in range(5):
        begun = time.monotonic()
        first, smaller, half = (
            (peer.call(torch.Tensor.data_ptr, x[skipped * MIB :]).wait(), _await_kept(b, most))
            for skipped, most in ((0, 8), (1, 8), (4, 12))
        )
        if time.monotonic() - begun < 1.0:  # else some may have been let go of meanwhile
            break
        until(lambda: kept(b) == 0)
    # One that is somewhat smaller finds room in it, one of half its size would waste it.
    assert first[0] == smaller[0] != half[0]
    assert all((first[1], smaller[1], half[1]))
    until(lambda: kept(b) == 0)  # nobody has wanted them for a while


def _await_kept(agent: Agent, mib: int) -> bool:
    """Whether it keeps so much within a second."""
    end = time.monotonic() + 1.0
    while kept(agent) < mib * MIB and time.monotonic() < end:
        time.sleep(0.001)
    return kept(agent) >= mib * MIB


def test_what_a_receiver_keeps_stays_as_it_is(a: Agent, b: Agent) -> None:
    peer = a.peer("b")
    for value in range(8):
        peer.call(handlers.note, f"{value}", bytes_of(5, value)).wait()
        assert peer.call(torch.sum, bytes_of(5, 100 + value)).wait() == (100 + value) * 5 * MIB
    for value in range(8):
        x = peer.call(handlers.recall, f"{value}").wait()
        assert x.min() == x.max() == value
        x += 1
        assert handlers.noted[f"{value}"].max() == value


def test_no_more_is_kept_than_the_agent_may_hold(a: Agent, b: Agent) -> None:
    peer = a.peer("b")
    for mib in (1, 2, 3, 5, 7, 10, 14, 20):
        peer.call(handlers.note, f"{mib}", bytes_of(mib, mib)).wait()
    for key in list(handlers.noted):
        del handlers.noted[key]
        assert kept(b) <= 32 * MIB
    until(lambda: kept(b) == 20 * MIB)


def test_a_forked_child_reads_and_lets_go_of_what_its_parent_received(a: Agent, b: Agent) -> None:
    peer = a.peer("b")
    x = peer.call(bytes_of, 6, 5).wait()
    peer.call(handlers.note, "x", bytes_of(6, 6)).wait()
    end, begin = os.pipe()
    child = quiet_fork()
    if child == 0:
        code = 1
        try:
            os.close(begin)
            os.read(end, 1)  # until the parent has let go of its own and had others
            code = int(int(x.sum()) != 5 * x.numel() or int(handlers.noted.pop("x").sum()) != 6 * x.numel())
            del x
        finally:
            os._exit(code)
    os.close(end)
    del x, handlers.noted["x"]
    for _ in range(3):
        assert peer.call(bytes_of, 6, 7).wait().sum() == 7 * 6 * MIB
        assert peer.call(torch.sum, bytes_of(6, 8)).wait() == 8 * 6 * MIB
    os.close(begin)
    assert os.waitpid(child, 0)[1] == 0


def test_a_tensor_outlives_the_agent_that_received_it() -> None:
    def use() -> None:
        with Agents() as meeting:
            a = meeting.join("a", timeout=PATIENCE)
            meeting.join("b", timeout=PATIENCE, host_id="elsewhere")
            x = a.peer("b").call(bytes_of, 6, 3).wait()
            a.peer("b").call(torch.sum, x).wait()
        assert x.sum() == 3 * x.numel()
        del x
        gc.collect()

    use()  # what stays for ever comes with the first use
    with no_leaks():
        use()
