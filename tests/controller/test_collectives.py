"""What the nodes of a place compute together."""

from __future__ import annotations

import copy
import math
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
from torch import nn

import shoal
from shoal.controller import Master, Place
from shoal.testing import run_threads
from tests.controller import collecting
from tests.controller.test_deaths import Program, start  # noqa: F401  # a fixture

Start = Callable[[Callable[[Connection], None]], Program]


def _different(place: Place, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of which node i of the place has i + 1, i + 2, ..."""
    ramp = torch.arange(math.prod(shape)).reshape(shape)
    return place.scatter([(ramp + i + 1).to(dtype) for i in range(len(place))])


def _parts(place: Place, tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = place.gather(tensor)
    assert isinstance(gathered, list)
    return gathered


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("op", "expected"), [("sum", 6), ("product", 6), ("min", 1), ("max", 3), ("avg", 2)])
def test_an_all_reduce_replaces_what_each_node_has(
    master: Master, dtype: torch.dtype, op: str, expected: int
) -> None:
    place = master.nodes
    x = _different(place, 1, dtype=dtype)
    assert place.all_reduce_(x, op=op) is x
    assert [each.tolist() for each in _parts(place, x)] == [[expected]] * 3


def test_collectives_of_some_nodes_and_of_one(master: Master) -> None:
    for nodes in ([0, 2], [1]):
        place = master.place(nodes)
        x = place.scatter([torch.full((2,), float(i + 1)) for i in range(len(nodes))])
        place.all_reduce_(x)
        assert place.mean(x).tolist() == [sum(range(len(nodes) + 1))] * 2
        assert place.mean(x).device.index == nodes[0]


def test_averages_of_many_tensors_of_several_dtypes(master: Master) -> None:
    place = master.nodes
    tensors = [_different(place, 3), _different(place, 2, 2, dtype=torch.float64), _different(place, 5), None]
    turned = _different(place, 2, 3).t()
    place.average_([*tensors, turned])
    for tensor in (*tensors[:3], turned):
        assert tensor is not None
        first, *others = _parts(place, tensor)
        assert all(torch.equal(first, other) for other in others)
    assert place.mean(turned).tolist() == [[2, 5], [3, 6], [4, 7]]
    place.average_([])
    place.average_(tensors[0])  # type: ignore[arg-type]


def test_broadcasts_gathers_and_scattered_reductions(master: Master) -> None:
    place = master.nodes
    x = _different(place, 3)
    assert [each.tolist() for each in _parts(place, place.all_gather(x))] == [
        [[1, 2, 3], [2, 3, 4], [3, 4, 5]]
    ] * 3
    scattered = place.reduce_scatter(x)
    assert [each.tolist() for each in _parts(place, scattered)] == [[6], [9], [12]]
    place.broadcast_(x, "node:1")
    assert [each.tolist() for each in _parts(place, x)] == [[2, 3, 4]] * 3


def test_a_mean_is_a_number_also_of_counts(master: Master) -> None:
    place = master.nodes
    assert place.mean(_different(place, 1).sum()).item() == 2
    assert place.mean(_different(place, 1, dtype=torch.int64).sum()).item() == 2
    assert place.mean(_different(place, 1) > 2).item() == pytest.approx(1 / 3)


def test_what_cannot_be_is_refused_at_its_line(master: Master) -> None:
    place, x = master.nodes, _different(master.nodes, 4)
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("needs a tensor on", lambda: place.mean(torch.ones(2, device="node:1"))),
        ("needs a tensor on", lambda: place.all_reduce_(torch.ones(2))),
        ("expected one of", lambda: place.all_reduce_(x, op="median")),
        ("divided evenly", lambda: place.reduce_scatter(x)),
        ("no meaning|cannot", lambda: place.all_reduce_(x.to(torch.complex64), op="max")),
        ("no part on", lambda: master.place([0, 1]).broadcast_(x.on(0).to(master.place([0, 1]).device), 2)),
    ]
    for words, attempt in attempts:
        with pytest.raises(shoal.UsageError, match=words):
            attempt()


def test_a_failure_at_one_node_is_that_of_all_and_the_group_stays(master: Master) -> None:
    place = master.nodes
    good, x = _different(place, 2), _different(place, 2)
    index = torch.tensor([9], device="node:1")
    x.on(1).add_(torch.ones(2, device="node:1")[index])  # the line that fails
    place.all_reduce_(x)
    mixed = place.mean(x)
    for part in (x.on(0), x.on(2), mixed):
        with pytest.raises(shoal.RemoteOpError, match="the line that fails") as caught:
            part.tolist()
        assert caught.value.worker == "node1"
    master.synchronize()
    place.all_reduce_(good)
    assert good.on(2).tolist() == [6, 9]


def _limit_memory(size: int | None) -> None:
    """Let this process allocate at most ``size`` more bytes; None: as many as before."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard if size is None else psutil.Process().memory_info().vms + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@pytest.mark.parametrize(
    ("name", "elements"), [("all_gather", 6 << 20), ("reduce_scatter", 3 << 24), ("mean", 1 << 24)]
)
def test_a_collective_whose_result_one_node_cannot_allocate_fails_at_all_and_the_next_one_works(
    no_master: None, name: str, elements: int
) -> None:
    with shoal.init_master_worker(workers=3) as master:
        place = master.nodes
        x = torch.ones(1, device=place.device).expand(elements)  # the result has at least 64 MB
        y = _different(place, 1)
        place.mean(y)  # the nodes have a group
        master.call(1, _limit_memory, 32 << 20)
        getattr(place, name)(x)
        place.all_reduce_(y)
        master.call(1, _limit_memory, None)
        assert y.on(1).tolist() == [6]  # first, because the other nodes may still wait
        for _ in place:  # the failure of the next node
            with pytest.raises(shoal.RemoteOpError, match=f"shoal_node.{name}.*allocate memory"):
                master.synchronize()
        assert [each.tolist() for each in _parts(place, y)] == [[6]] * 3


def test_collectives_and_copies_in_any_order_do_not_wait_for_each_other(master: Master) -> None:
    place, pair = master.nodes, master.place([0, 1])
    x, y = torch.ones(50_000, device=place.device), torch.ones(50_000, device=pair.device)
    a, b = torch.ones(40_000, device="node:0"), torch.ones(40_000, device="node:1")
    for step in range(40):
        a, b = b.to("node:0"), a.to("node:1")
        place.all_reduce_(x, op="avg")
        if step % 3:
            pair.all_reduce_(y, op="avg")
            b = b.to("node:2").to("node:1")
    assert [each[-1].item() for each in (x.on(2), y.on(0), a, b)] == [1] * 4


def test_gradients_are_those_of_data_parallel_training(master: Master) -> None:
    place = master.nodes
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    data = torch.randn(4, 9, 6, dtype=torch.float64)

    def rank(group: shoal.ProcessGroup) -> list[float]:
        model = shoal.DistributedDataParallel(copy.deepcopy(net), group=group)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for batch in data:
            loss = model(batch[group.rank :: 3]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(group.all_reduce(loss.detach(), op="avg").wait().item())
        return losses

    ours = copy.deepcopy(net).to(place.device)
    optimiser = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in data:
        loss = ours(place.scatter([batch[i::3] for i in range(3)])).square().mean()
        optimiser.zero_grad()
        loss.backward()
        place.average_(parameter.grad for parameter in ours.parameters())
        optimiser.step()
        losses.append(place.mean(loss).item())
    assert losses == pytest.approx(run_threads(rank, 3)[0], rel=1e-12)


def test_a_node_killed_in_a_collective_is_lost_and_the_others_go_on(start: Start) -> None:  # noqa: F811
    program = start(collecting.loses_a_node)
    assert program.told() == "lost"
    assert program.told() == "done"
    assert program.ended() == 0


@pytest.mark.stress
@pytest.mark.parametrize("trial", range(2 if os.environ.get("STRESS") == "short" else 20))
def test_nodes_are_killed_in_collectives(start: Start, trial: int) -> None:  # noqa: F811
    program = start(collecting.loses_a_node)
    while program.told() != "done":
        pass
    assert program.ended() == 0
