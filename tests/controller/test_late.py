"""Nodes that hear of another one's death late, because they were busy."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shoal.controller.node.peers import Peers, RemoteFailure
from shoal.controller.protocol.commands import LOST
from shoal.controller.tensor import transfer
from shoal.controller.tensor.dispatch import dispatch
from shoal.errors import NodeLost
from tests.controller.nodes import BACKSTOP, Crew, crews, programs

start = pytest.fixture(programs)


crew = pytest.fixture(crews)


class Busy:
    """A function of the program that keeps a node busy until it is let go."""

    def __init__(self, crew: Crew, index: int, files: Path) -> None:
        self._begun, self._go = files / f"begun{index}", files / f"go{index}"
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(crew, index))
        self._thread.start()
        _wait_for(self._begun)

    def _run(self, crew: Crew, index: int) -> None:
        with contextlib.suppress(NodeLost):
            crew.master.call(index, _waits, self._begun, self._go)

    def end(self) -> None:
        """Let it go on."""
        self._go.touch()
        self._thread.join(BACKSTOP)


def _waits(begun: Path, go: Path) -> None:
    begun.touch()
    _wait_for(go)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + BACKSTOP
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("deaths", [1, 2])
def test_what_was_to_come_from_a_node_that_was_replaced_meanwhile_is_lost(
    crew: Crew, tmp_path: Path, deaths: int
) -> None:
    master = crew.master
    place, others = master.place([0, 1]), master.nodes
    x = torch.ones(3, device="node:1")
    busy, dying = Busy(crew, 0, tmp_path), Busy(crew, 1, tmp_path)
    copied = x.to("node:0")
    first = place.all_reduce_(place.replicate(torch.ones(2))).on(0)
    for _ in range(deaths):
        crew.kill(1)
        crew.joining()
        master.replace(1, BACKSTOP)
    dying.end()
    again = torch.full((3,), 5.0, device="node:1").to("node:0")
    second = place.all_reduce_(place.replicate(torch.ones(2)))
    third = others.all_reduce_(others.replicate(torch.ones(2)))
    back = torch.ones(2, device="node:0").to("node:1")
    busy.end()
    for lost in (copied, first):
        with pytest.raises(NodeLost, match="node 1 was lost") as caught:
            lost.tolist()
        assert caught.value.ranks == (1,)
    assert again.tolist() == [5] * 3
    assert [each.tolist() for each in place.gather(second)] == [[2, 2]] * 2
    assert [each.tolist() for each in others.gather(third)] == [[3, 3]] * 3
    assert back.tolist() == [1, 1]


def test_a_death_is_told_while_the_program_waits_for_a_node_that_waits_for_the_dead_one(
    crew: Crew, tmp_path: Path
) -> None:
    busy = Busy(crew, 1, tmp_path)
    x = torch.ones(3, device="node:1").to("node:0")
    killing = threading.Timer(0.05, os.kill, (crew.master.pids[1], signal.SIGKILL))
    killing.start()
    with pytest.raises(NodeLost, match="node 1 was lost"):
        x.nonzero()  # the node is asked for the shape
    killing.join()
    busy.end()


def test_what_a_place_lost_in_the_middle_of_a_copy_leaves_no_other_copy_wrong(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 is sent a tensor of which the program gets nothing, as node 2 is lost before it awaits it."""
    master, send = crew.master, torch.ops.shoal_node.send.default
    place = master.place([1, 2])
    x, y = (torch.full((3,), each, device="node:0") for each in (1.0, 2.0))
    master.synchronize()

    def losing(func: Any, *rest: Any) -> Any:
        result = dispatch(func, *rest)
        if func is send:
            crew.kill(2)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(transfer, "dispatch", losing)
        with pytest.raises(NodeLost, match="node 2 was lost"):
            x.to(place.device)
    assert y.to("node:1").tolist() == [2, 2, 2]


def _peers(index: int, epoch: int) -> Peers:
    return Peers("session", index, epoch, cast("Any", SimpleNamespace(name="me")), {0: ("a", 0), 1: ("b", 0)})


def _lost(peers: Peers, channel: int) -> tuple[int, int]:
    """Take all that node 1 has sent; why there is no more."""
    try:
        while True:
            peers.receive(1, channel)
    except RemoteFailure as why:
        return why.node, why.number


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_deaths_and_replacements_may_be_heard_of_in_any_order(order: tuple[int, ...]) -> None:
    peers = _peers(0, 3)
    peers.deliver((1, 3, 0), torch.ones(1))  # what came before its death was sent
    heard = [
        lambda: peers.lose_node(1, 0), lambda: peers.add_node(1, "c", 1), lambda: peers.lose_node(1, 1),
        lambda: peers.add_node(1, "d", 2),
    ]  # fmt: skip
    for each in order[:3]:
        heard[each]()
        if 3 in order[:3] and each == 3:
            assert peers.name(1, 2) == "d"
    heard[order[3]]()
    assert [peers.name(1, epoch) for epoch in range(3)] == [None, None, "d"]
    assert [peers.lost([0, 1], base) for base in range(5)] == [1] * 5
    for channel in (3, 4):
        assert _lost(peers, channel) == (1, LOST)
    peers.deliver((1, 4, 7), torch.ones(1))  # whose receiver gave up: it must not be kept
    assert not peers._arrived
    peers.deliver((1, 5, 0), torch.full((1,), 5.0))
    assert peers.receive(1, 5).item() == 5


def test_who_is_sent_to_is_waited_for_until_it_is_known() -> None:
    peers = _peers(0, 0)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(peers.name(1, 1))),
        threading.Thread(target=lambda: found.append(peers.names([0, 1, 2], 1))),
    ]
    for each in threads:
        each.start()
    peers.add_node(2, "e", 0)
    assert not found
    peers.add_node(1, "c", 1)
    for each in threads:
        each.join(BACKSTOP)
    assert sorted(found, key=str) == [["me", "c", "e"], "c"]
    assert peers.names([0, 1], 0) is None
    peers.close()
    assert peers.name(3, 0) is None
