"""More than a worker can take: memory stays within its bound, and whoever sends too much is told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from shoal.errors import AgentClosed, CallTimeout
from shoal.rpc import Agent, Peer
from shoal.testing import Agents
from tests.rpc import handlers
from tests.support.waiting import until

MIB = 1 << 20
#: what a post takes in beside large parts that the budget counts: the window of a connection, and buffers
ASIDE = 48 * MIB


def until_there(path: Path) -> None:
    """Run until somebody has made a file: no call would come through."""
    until(path.exists)


def post_all(peer: Peer, letter: bytes) -> None:
    """Post more than there is room for."""
    for _ in range(3):
        peer.post(len, letter)


def resident(meeting: Agents, name: str) -> int:
    """Bytes that a worker's process occupies."""
    return int(psutil.Process(meeting.pids[name]).memory_info().rss)


def test_a_flood_of_letters_stops_at_its_sender(meeting: Agents, a: Agent, tmp_path: Path) -> None:
    meeting.start("b", handlers=1)
    b = a.peer("b")
    patient = b.options(timeout=120)
    running = patient.call(until_there, tmp_path / "go on")
    before = resident(meeting, "b")
    letter = b"x" * 100_000
    futures = []
    while a.stats()["queued"] <= 64 * MIB - 2 * len(letter):
        futures.append(patient.call(len, letter))
    hasty = b.options(timeout=0.2)
    with pytest.raises(CallTimeout, match=r"within 0\.2 s: .*takes nothing for .* packets queued"):
        [hasty.call(len, letter) for _ in range(3)][-1].wait()
    with pytest.raises(CallTimeout, match="was not sent: the worker did not receive within the timeout"):
        post_all(hasty, letter)
    assert a.stats()["queued"] <= 64 * MIB
    assert resident(meeting, "b") - before < ASIDE
    # The flood is over: what is still wanted is served, and nothing stays.
    (tmp_path / "go on").touch()
    for future in futures:
        assert future.wait() == len(letter)
    running.wait()
    until(lambda: not a.stats()["queued"])


def test_a_post_that_waits_for_room_ends_with_its_agent(meeting: Agents, tmp_path: Path) -> None:
    def post_many() -> None:
        for _ in range(3_000):
            b.post(len, letter)

    meeting.start("b", handlers=1)
    a = meeting.join("a")
    b = a.peer("b").options(timeout=120)
    b.post(until_there, tmp_path / "go on")
    letter = b"x" * 100_000
    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(post_many)
        try:
            until(lambda: a.stats()["queued"] > 32 * MIB)
            time.sleep(0.2)  # so that it waits
        finally:
            a.close(1.0, graceful=False)
        with pytest.raises(AgentClosed, match="closed"):
            posting.result(60)
    (tmp_path / "go on").touch()


def test_large_parts_that_nobody_takes_wait_at_their_sender(meeting: Agents, a: Agent) -> None:
    limit = 16 * MIB
    b = meeting.join("b", handlers=1, memory=limit, host_id="elsewhere")  # on one host they would be lent
    running = a.peer("b").call(handlers.blocked, "go on")
    handlers.wait_for("go on runs")
    x = torch.ones(MIB // 2)  # 2 MiB
    futures = [a.peer("b").call(torch.sum, x) for _ in range(40)]
    until(lambda: b.stats()["granted"] > limit - 8 * x.numel())
    for _ in range(50):  # and it does not become more
        assert b.stats()["granted"] <= limit
        time.sleep(0.005)
    handlers.note("go on", 3)
    assert running.wait() == 3
    assert [future.wait().item() for future in futures] == [x.numel()] * 40
    until(lambda: not b.stats()["granted"])


def test_a_flood_of_replies_stays_within_the_memory_of_whoever_called(meeting: Agents) -> None:
    limit = 16 * MIB
    meeting.start("b", memory=limit)
    a = meeting.join("a", timeout=60, memory=limit)
    ended = threading.Event()
    granted: list[int] = []

    def watch() -> None:
        while not ended.wait(0.002):
            granted.append(a.stats()["granted"])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        futures = [a.peer("b").call(torch.full, (MIB,), float(i)) for i in range(30)]  # 4 MiB each
        for i, future in enumerate(futures):
            assert future.wait()[-1] == i
    finally:
        ended.set()
        watching.join()
    assert max(granted, default=0) <= limit
    assert a.stats()["granted"] == 0
