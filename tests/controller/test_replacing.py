"""Nodes that died, and others in their place."""

from __future__ import annotations

import gc
import os
import re
import signal
import weakref
from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.errors import NodeLost, RemoteOpError, UsageError
from tests.controller import nodes
from tests.controller.nodes import BACKSTOP, Crew, Program, crews, programs, wait_until_gone, wait_until_lost

start = pytest.fixture(programs)


crew = pytest.fixture(crews)


def test_a_replaced_node_begins_empty_and_what_was_on_it_is_lost_for_good(crew: Crew) -> None:
    master = crew.master
    x, y = (torch.arange(4.0, device=f"node:{each}") for each in (0, 1))
    warm = torch.zeros(4, device="node:1")
    _ = warm + warm  # a call that is interned: the new node must not be sent it for an old tensor
    lost: list[int] = []
    master.on_lost(lost.append)
    crew.kill(1)
    new = crew.joining()
    assert master.replace(1, BACKSTOP) == torch.device("node:1")
    assert master.pids[1] == new.pid
    assert lost == [1]
    again = torch.full((4,), 5.0, device="node:1")
    assert (again + again).tolist() == [10] * 4
    for use in (
        lambda: y + y, lambda: y.tolist(), lambda: again + y, lambda: y + again, lambda: again.copy_(y),
        lambda: torch.cat([again, y]), lambda: y.to("node:0"), lambda: x.copy_(y), lambda: y.nonzero(),
        lambda: torch.nonzero(again[y]),
    ):  # fmt: skip
        with pytest.raises(NodeLost, match="node 1 was lost"):
            use()
    assert (x + 1).tolist() == [1, 2, 3, 4]
    assert (again.to("node:0") + x).tolist() == [5, 6, 7, 8]
    master.synchronize()
    crew.kill(1)
    with pytest.raises(NodeLost):
        again.tolist()
    crew.joining()
    master.replace("node:1", BACKSTOP)
    assert lost == [1, 1]
    assert torch.ones(2, device="node:1").tolist() == [1, 1]


def test_places_of_a_replaced_node_can_be_used_again(crew: Crew) -> None:
    team = crew.master.nodes
    x = team.replicate(torch.arange(3.0))
    others = crew.master.place([0, 2]).replicate(torch.ones(2))
    crew.kill(2)
    crew.joining()
    crew.master.replace(2, BACKSTOP)
    with pytest.raises(NodeLost, match="node 2 was lost"):
        x + x
    with pytest.raises(NodeLost, match="node 2 was lost"):
        x.on(2)  # type: ignore[attr-defined]
    y = team.replicate(torch.full((3,), 7.0))
    with pytest.raises(NodeLost, match="node 2 was lost"):
        y + x
    assert [each.tolist() for each in team.gather(y + y)] == [[14.0] * 3] * 3
    assert x.on(0).tolist() == [0, 1, 2]  # type: ignore[attr-defined]
    assert others.on(0).tolist() == [1, 1]  # type: ignore[attr-defined]
    del x, others
    crew.master.synchronize()
    assert crew.master.nodes is team


def test_a_failure_of_a_lost_node_is_not_taken_for_one_of_its_successor(crew: Crew) -> None:
    def fails() -> torch.Tensor:
        return torch.ones(2, device="node:0")[torch.tensor([5], device="node:0")]

    copied = fails().to("node:1")
    assert torch.ones(1, device="node:1").item() == 1  # node 1 has heard of it
    crew.kill(0)
    crew.joining()
    crew.master.replace(0, BACKSTOP)
    with pytest.raises(RemoteOpError, match="out of bounds"):
        fails().tolist()
    with pytest.raises(RemoteOpError, match="an operation failed, and its error is no longer stored"):
        copied.tolist()


def test_copies_and_collectives_work_among_whoever_was_replaced_in_whatever_order(crew: Crew) -> None:
    master = crew.master

    def check() -> None:
        for i in range(3):
            for j in range(3):
                assert torch.full((2,), float(i), device=f"node:{i}").to(f"node:{j}").tolist() == [i] * 2
        left, right = master.place([0, 1]), master.place([1, 2])
        there = left.replicate(torch.arange(3.0)).to(right.device)
        assert [each.tolist() for each in left.gather(there.to(left.device))] == [[0, 1, 2]] * 2
        for place in (master.nodes, left):
            x = place.replicate(torch.ones(2))
            place.all_reduce_(x)
            assert [each.tolist() for each in place.gather(x)] == [[len(place)] * 2] * len(place)

    check()
    for index in (2, 1):  # places with node 2 copied between nodes 0 and 1 before that was replaced too
        crew.kill(index)
        crew.joining()
        master.replace(index, BACKSTOP)
        check()


def test_a_replacement_is_started_here_where_the_lost_one_was(no_master: None) -> None:
    with shoal.init_master_worker(workers=1) as master:
        first = master.pids[0]
        with pytest.raises(UsageError, match="node 0 was not lost"):
            master.replace(0)
        os.kill(first, signal.SIGKILL)
        wait_until_lost(master, 0)
        torch.manual_seed(3)  # for the others, and for those to come
        master.replace(0, BACKSTOP)
        assert master.pids[0] != first
        assert torch.rand(2, device="node:0").tolist() == (torch.manual_seed(3) and torch.rand(2)).tolist()
        pids = master.pids
    wait_until_gone([first, *pids])


def test_with_sync_what_fails_raises_at_its_line(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Program]
) -> None:
    monkeypatch.setenv("SHOAL_CONTROLLER", "sync")
    crew.kill(0)
    crew.joining()
    crew.master.replace(0, BACKSTOP)  # the others go on as they began
    x = torch.arange(4, device="node:0")
    with pytest.raises(RemoteOpError, match=r"node 0: aten\.index\.Tensor") as caught:
        x[torch.tensor([9], device="node:0")]
    assert "x[torch.tensor([9]" in caught.value.line
    assert (x + 1).tolist() == [1, 2, 3, 4]
    crew.master.synchronize()


def test_what_nodes_write_comes_as_whole_lines(
    python_starts: None, capfd: pytest.CaptureFixture[str]
) -> None:
    master = shoal.init_master_worker(workers=2)
    assert master.call([0, 1], gc.get_freeze_count)[0] > 100_000, "garbage collections look at all of torch"
    agent = master._workers.agent
    count = 2000
    written = [peer.call(_write, count) for peer in agent.peers()]
    for each in written:
        each.wait(BACKSTOP)
    master.close()
    out, err = capfd.readouterr()
    lines = out.splitlines()
    for index in range(2):
        mine = [line for line in lines if line.startswith(f"[node {index}] ")]
        assert mine == [f"[node {index}] {number} {'x' * 50}" for number in range(count)]
    assert len(lines) == 2 * count
    assert sorted(err.splitlines()) == [f"[node {index}] 100%" for index in range(2)]


def _write(count: int) -> None:
    for number in range(count):
        print(number, "x" * 50)
    os.write(2, b"10%\r50%\r")
    os.write(2, b"100%\r\n")


def test_streams_of_a_replaced_node_are_lost_and_those_of_the_new_one_work(crew: Crew) -> None:
    master, team = crew.master, crew.master.nodes
    kept, old = shoal.Stream("node:0"), [shoal.Stream("node:1"), shoal.Stream(team)]
    x, y = torch.ones(3, device="node:0"), torch.ones(3, device="node:1")
    event = shoal.Event()
    for stream in (kept, *old):
        with stream:
            x.add_(1)
            y.add_(1)
            team.all_reduce_(team.replicate(torch.ones(2)))
    event.record(old[0])
    crew.kill(1)
    crew.joining()
    master.replace(1, BACKSTOP)
    for stream in old:
        with pytest.raises(NodeLost, match="node 1 was lost"):
            stream.synchronize()
    event.wait(kept)  # holds nobody
    with pytest.raises(NodeLost, match="node 1 was lost"):
        y.tolist()
    for stream in old:
        with pytest.raises(NodeLost, match="node 1 was lost"), stream:
            raise AssertionError("what the program issues here would go to the default stream")
    new, wide = shoal.Stream("node:1"), shoal.Stream(team)
    assert new not in old
    for stream in (kept, new, wide):
        with stream:
            x.add_(1)
            z = x.to("node:1")
            z.mul_(2)
            both = team.replicate(torch.ones(2))
        with new:
            z.add_(1)
        with wide:
            team.all_reduce_(both)
            both.add_(1)
        assert z.tolist() == [x[0].item() * 2 + 1] * 3
        assert both.on(1).tolist() == [4, 4]
    assert x.tolist() == [7] * 3
    with new:
        crew.kill(1)
        crew.joining()
        master.replace(1, BACKSTOP)
        with pytest.raises(NodeLost, match="node 1 was lost"):
            torch.ones(3, device="node:1")
    assert torch.ones(3, device="node:1").tolist() == [1] * 3
    with pytest.raises(NodeLost, match="node 1 was lost"):
        wide.query()
    master.synchronize()


def test_the_error_of_a_lost_node_tells_what_it_had_not_done(crew: Crew) -> None:
    x, y = (torch.ones(4, device=f"node:{each}") for each in (0, 1))
    side = shoal.Stream("node:0")
    z = x * 5
    y * 6
    crew.master.synchronize()
    nodes.stop(crew.master.pids[0])
    x.add_(1)
    for _ in range(3):
        x.mul_(2)
    with side:
        z.sub_(3)
    for connection in crew.master._nodes[0].streams:
        connection.flush()
    os.kill(crew.master.pids[0], signal.SIGKILL)
    with pytest.raises(NodeLost) as caught:
        x.tolist()
    why, first, second = str(caught.value).splitlines()
    assert why.startswith("node 0 was lost: ")
    assert re.fullmatch(
        r"it had not acknowledged aten\.add_\.Tensor, issued at .*: x\.add_\(1\); 3 operations came after it",
        first,
    )
    assert re.fullmatch(
        r"stream \d+ of it had not acknowledged aten\.sub_\.Tensor, issued at .*: z\.sub_\(3\)", second
    )
    os.kill(crew.master.pids[1], signal.SIGKILL)

    def ask_for_ever() -> None:
        while True:
            y.tolist()

    with pytest.raises(
        NodeLost, match=r"it had done all operations sent to it; the last was aten\.mul.*: y \* 6$"
    ):
        ask_for_ever()


def test_errors_of_a_lost_node_keep_nothing_of_those_who_met_them(crew: Crew) -> None:
    x, y = torch.ones(4, device="node:0"), torch.ones(4, device="node:1")
    crew.kill(0)
    met: list[weakref.ref[torch.Tensor]] = []

    def meet(use: Callable[[], object]) -> None:
        mine = torch.ones(4)
        met.append(weakref.ref(mine))
        use()

    for use in (
        x.tolist, x.sum, crew.master.synchronize, lambda: x.to("node:1"), lambda: y.to("node:0"),
        lambda: shoal.Stream("node:0"), lambda: x + y, x.nonzero,
    ):  # fmt: skip
        with pytest.raises(NodeLost):
            meet(use)
    gc.collect()
    assert [each() for each in met] == [None] * len(met)
