"""A master whose nodes die again and again: neither it nor the nodes that live grow."""

from __future__ import annotations

import gc
import os
from collections import Counter

import psutil
import pytest
import torch

import shoal
from shoal.controller.commands import history
from shoal.errors import NodeLost
from tests.controller.nodes import BACKSTOP, Crew, crews, programs
from tests.support.holdings import grown, holdings
from tests.support.waiting import until

start = pytest.fixture(programs)
crew = pytest.fixture(crews)
SHORT = os.environ.get("STRESS") == "short"


#: of the master, beside objects of dead nodes, which calls that are remembered hold for a while
_TABLES = (
    "threads",
    "descriptors",
    "shoal.controller.tensor.stream_order.StreamOrder",
    "shoal.controller.api.master.Master",
)
#: keep something of the last thousand connections, or workers, that ended; or of the calls that a node knows,
#: which are forgotten at 65,536: copies to a node that was replaced are other calls, on other channels
_BOUNDED = (
    "shoal.rpc.", "shoal.store.", "shoal.controller.start.roster.Roster._failed",
    "shoal.controller.tensor.calls.InternedCall", "shoal.controller.commands.history.",
    "shoal.controller.commands.space.Space.calls", "shoal.controller.commands.space.Space.kinds",
    "shoal.controller.protocol.commands.Definition",
    "shoal.controller.protocol.metadata.WireMetadata", "shoal.controller.node.execute.SpaceExecutor",
    "shoal.controller.node.session_state.StreamProgress", "shoal.controller.node.history.",
)  # fmt: skip


def _round(crew: Crew, number: int) -> None:
    """Use all that nodes have, lose one of them, and replace it."""
    master, team = crew.master, crew.master.nodes
    victim = 1 + number % 2
    side, near, wide = shoal.Stream(f"node:{victim}"), shoal.Stream("node:0"), shoal.Stream(team)
    x, y = (torch.ones(64, 64, device=f"node:{each}", requires_grad=True) for each in (0, victim))
    both = team.replicate(torch.ones(8))
    with side, near:
        z = (x.to(y.device) @ y).sum()
        z.backward()  # type: ignore[no-untyped-call]
    event = side.record_event()
    event.wait(near)
    team.all_reduce_(both)
    with wide:
        both.add_(1)
    assert master.call(victim, float, 3) == 3
    assert both.on(0).tolist() == [4] * 8  # type: ignore[attr-defined]
    dead = next(each for each in crew.workers if each.pid == master.pids[victim])
    crew.kill(victim)
    for use in (y.tolist, both.sum, lambda: x.to(y.device)):
        with pytest.raises(NodeLost):
            use()
    crew.workers.remove(dead)
    dead.close()
    crew.joining()
    master.replace(victim, BACKSTOP)


def _rounds(crew: Crew, count: int) -> None:
    for number in range(count):
        _round(crew, number)
        gc.collect()  # or more streams are made than are used at once, by chance


def _held(crew: Crew) -> tuple[Counter[str], Counter[str], int]:
    """Count the objects of the master and of node 0; the memory of node 0, in bytes."""
    crew.master.synchronize()
    there = crew.master.call(0, holdings)
    return holdings(), there, psutil.Process(crew.master.pids[0]).memory_info().rss


@pytest.mark.parametrize("rounds", [4, pytest.param(10 if SHORT else 100, marks=pytest.mark.stress)])
def test_nothing_grows_with_deaths(crew: Crew, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    monkeypatch.setattr(history, "MAX_HISTORY_OPERATIONS", 50)
    _rounds(crew, rounds)
    before = _held(crew)
    _rounds(crew, rounds)
    after = _held(crew)

    def more() -> list[dict[str, int]]:
        found = [grown(*each, rounds) for each in zip(before[:2], _held(crew)[:2], strict=True)]
        names = [name for name in found[0] if name.startswith(_TABLES)]
        names += [name for name in found[1] if not name.startswith(_BOUNDED)]
        return found if names else []

    # Threads of pools, of which a busy machine has some more, end when they have had nothing to do.
    until(lambda: not more(), more)
    print(f"node 0 has grown by {(after[2] - before[2]) >> 10} KiB in {rounds} deaths")
