"""Recorded steps and the death of a node: in a recording and in a replay, and the step afterwards."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.controller import Master
from shoal.errors import NodeLost
from shoal.store import TCPStoreServer
from shoal.testing import no_leaks
from tests.controller.nodes import BACKSTOP, SECRET, Crew, Program, programs

start = pytest.fixture(programs)
SHORT = os.environ.get("STRESS") == "short"


def _made(master: Master) -> tuple[Any, Any]:
    """A step over all nodes, places and copies between them, and another one on one node only."""
    place = master.nodes

    @master.recorded
    def everywhere(x: Tensor) -> Tensor:
        y = x.to(place.device)
        for _ in range(20):
            y = y * 1.0 + 1.0
        place.all_reduce_(y, "max")
        return (y.on(0).to("node:1") * 2).to("node:2") + y.on(2)

    @master.recorded
    def alone(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x + 1
        return x

    return everywhere, alone


def _one(crew: Crew, choose: random.Random, made: tuple[Any, Any], survivor: Tensor) -> None:
    """Kill a node while steps are recorded, or replayed; then its successor does the same steps."""
    master = crew.master
    everywhere, alone = made
    index, count = choose.choice([0, 2]), choose.choice([0, 0, 3])
    here = torch.zeros(4)
    for _ in range(count):  # from the third on, a replay
        assert everywhere(here).tolist() == [60] * 4
    moment, pid = choose.random() ** 2 * 0.01, master.pids[index]
    killing = threading.Thread(target=lambda: (time.sleep(moment), os.kill(pid, signal.SIGKILL)))
    killing.start()
    deadline = time.monotonic() + BACKSTOP

    def until_lost() -> None:
        while time.monotonic() < deadline:
            everywhere(here).tolist()

    with pytest.raises(NodeLost) as caught:
        until_lost()
    killing.join()
    assert caught.value.ranks == (index,)
    with pytest.raises(NodeLost):
        everywhere(here).tolist()
    assert alone(survivor).tolist() == [20] * 4  # goes on, as a replay
    crew.joining()
    master.replace(index, BACKSTOP)
    for value in range(4):
        assert everywhere(torch.full((4,), float(value))).tolist() == [3.0 * (value + 20)] * 4


def _kill(start: Callable[..., Program], trials: int) -> None:
    choose = random.Random(trials)
    with TCPStoreServer(secret=SECRET.encode()) as server, no_leaks():
        crew = Crew(start, server.url, 3)
        with crew.master as master:
            made = _made(master)
            survivor = torch.zeros(4, device="node:1")
            for _ in range(4):
                made[1](survivor)
            before = made[1].recordings
            for _ in range(trials):
                _one(crew, choose, made, survivor)
            assert made[1].recordings == before
            assert made[0].replays >= trials
        with pytest.raises(shoal.ShoalError):
            made[0](torch.zeros(4)).tolist()
        crew.end()


@pytest.mark.usefixtures("no_master")
def test_a_node_that_is_killed_in_a_recorded_step_is_named_and_its_successor_does_the_step(
    start: Callable[..., Program],
) -> None:
    _kill(start, 4)


@pytest.mark.stress
@pytest.mark.usefixtures("no_master")
def test_many_nodes_that_are_killed_in_recorded_steps_are_named(start: Callable[..., Program]) -> None:
    _kill(start, 30 if SHORT else 200)
