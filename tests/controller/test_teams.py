"""The groups of nodes, with threads in the place of nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from shoal.controller.node.peers import Peers, RemoteFailure
from shoal.controller.node.place_groups import PlaceGroups
from shoal.controller.protocol.commands import LOST
from shoal.errors import GroupAborted, ShoalError
from shoal.group import ProcessGroup
from shoal.rpc import Agent
from shoal.testing.agents import run_agents

T = TypeVar("T")
NAMES = {0: "a", 1: "b", 2: "c"}
NODES = {index: (name, 0) for index, name in NAMES.items()}
MEMBERS = [0, 1, 2]


def _summed(group: ProcessGroup) -> float:
    return float(group.all_reduce(torch.ones(1)).wait().item())


def _run(work: Callable[[int, PlaceGroups], T], options: dict[str, str] | None = None) -> list[T]:
    """``work(index, teams)`` at three nodes."""

    def node(agent: Agent) -> T:
        index = next(i for i, name in NAMES.items() if name == agent.name)
        teams = PlaceGroups(Peers("session", index, 0, agent, NODES), "native", options or {})
        try:
            return work(index, teams)
        finally:
            teams.close()

    results = run_agents(dict.fromkeys(NAMES.values(), node))
    return [results[name] for name in NAMES.values()]


def test_the_group_has_the_transport_that_the_master_was_given() -> None:
    def work(index: int, teams: PlaceGroups) -> object:
        def body(group: ProcessGroup) -> object:
            assert _summed(group) == 3
            return group._links.options

        return teams.run((0, 1, 2), 0, body)

    assert _run(work, {"transport": "tcp"}) == [{"transport": "tcp"}] * 3


def test_nodes_become_a_group_without_meeting() -> None:
    assert _run(lambda index, teams: [teams.run(MEMBERS, 0, _summed) for _ in range(3)]) == [[3, 3, 3]] * 3


def test_a_poisoned_tensor_ends_one_collective_and_no_group() -> None:
    def work(index: int, teams: PlaceGroups) -> tuple[int, int, float]:
        with pytest.raises(RemoteFailure) as caught:
            teams.run(MEMBERS, 0, _summed, (1, 5) if index == 1 else None)
        return caught.value.node, caught.value.number, teams.run(MEMBERS, 0, _summed)

    assert _run(work) == [(1, 5, 3)] * 3


def test_what_fails_at_one_member_is_an_error_at_all_that_wait_and_the_next_use_makes_a_new_group() -> None:
    """Node 0 has come to the end of its part before, and goes on to the next collective."""

    def work(index: int, teams: PlaceGroups) -> list[object]:
        def body(group: ProcessGroup) -> float | None:
            if index == 2:
                raise ValueError("bad")
            return _summed(group) if index == 1 else None

        results: list[object] = []
        for _ in range(3):
            try:
                results.append(teams.run(MEMBERS, 0, body))
            except (ShoalError, ValueError) as error:
                results.append(type(error))
            results.append(teams.run(MEMBERS, 0, _summed))
        return results

    assert _run(work) == [[None, 3] * 3, [GroupAborted, 3] * 3, [ValueError, 3] * 3]


def test_a_member_that_has_died_is_named_before_and_after_the_group_was_made() -> None:
    met = threading.Barrier(3)
    told: list[Peers] = []

    def work(index: int, teams: PlaceGroups) -> list[int]:
        told.append(teams._peers)
        met.wait()
        if index == 2:
            for peers in told:
                peers.lose_node(2, 0)
            return []
        lost = []
        for _ in range(2):
            with pytest.raises(RemoteFailure) as caught:
                teams.run(MEMBERS, 0, _summed)
            lost.append(caught.value.node)
            assert caught.value.number == LOST
        assert teams.run([0, 1], 0, _summed) == 2
        return lost

    assert _run(work) == [[2, 2], [2, 2], []]
