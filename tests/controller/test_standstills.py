"""Nodes whose processes are stopped: for a moment, and for longer than the others wait."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import shoal
from shoal.errors import NodeLost
from tests.controller.nodes import BACKSTOP, Crew, Program, crews, programs, stop, wait_until_gone

start = pytest.fixture(programs)


@pytest.fixture
def crew(start: Callable[..., Program], no_master: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    monkeypatch.setenv("SHOAL_HEARTBEAT_TIMEOUT", "0.3")
    yield from crews(start, no_master)


def test_a_node_that_stays_stopped_is_lost_to_all_who_wait_for_it(crew: Crew) -> None:
    master, team = crew.master, crew.master.nodes
    victim = next(each for each in crew.workers if each.pid == master.pids[1])
    x, y = torch.ones(3, device="node:0"), torch.ones(3, device="node:1")
    both = team.replicate(torch.ones(3))
    team.all_reduce_(both)
    master.synchronize()
    stop(victim.pid)
    team.all_reduce_(both)
    z = y.to("node:0") + x
    for use in (
        lambda: both.on(0).tolist(),  # type: ignore[attr-defined]
        z.tolist, y.tolist, master.synchronize, lambda: x.to("node:1"),
    ):  # fmt: skip
        with pytest.raises(NodeLost, match=r"node 1 was lost: its process was stopped by a signal for 0.3 s"):
            use()
    assert (x + 1).tolist() == [2] * 3
    crew.joining()
    master.replace(1, BACKSTOP)
    both = team.all_reduce_(team.replicate(torch.ones(3)))
    assert [each.tolist() for each in team.gather(both)] == [[3] * 3] * 3
    os.kill(victim.pid, signal.SIGCONT)
    assert victim.told().startswith("waits for a master at")
    assert victim.told() == "waits for another master"
    assert (both.on(0) + x).tolist() == [4] * 3  # type: ignore[attr-defined]


def test_a_stopped_process_is_ended_when_it_is_replaced(
    no_master: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HEARTBEAT_TIMEOUT", "0.2")
    with shoal.init_master_worker(workers=1) as master:
        x = torch.ones(3, device="node:0")
        first = master.pids[0]
        stop(first)
        with pytest.raises(NodeLost, match="node 0 was lost: its process was stopped"):
            x.tolist()
        master.replace(0, BACKSTOP)
        wait_until_gone([first])
        assert torch.ones(3, device="node:0").tolist() == [1] * 3


def test_a_node_that_is_stopped_for_a_while_goes_on_with_its_collectives(
    no_master: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HEARTBEAT_TIMEOUT", "1000")
    with shoal.init_master_worker(workers=2) as master:
        team = master.nodes
        both = team.all_reduce_(team.replicate(torch.ones(3)))
        master.synchronize()
        stop(master.pids[1])
        team.all_reduce_(both)
        time.sleep(2.5)  # ranks of a job would have given it up; what is tested is that nodes do not
        os.kill(master.pids[1], signal.SIGCONT)
        assert [each.tolist() for each in team.gather(both)] == [[4] * 3] * 2
