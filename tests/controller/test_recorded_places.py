"""Recorded steps that concern several nodes: places, parts of them, copies, collectives, uploads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.controller import Master
from shoal.controller.api.place import Place
from tests.controller.trainings import copied

STEPS = 7

#: makes a step, and a function that looks at what it has left
Make = Callable[[Place], tuple[Callable[..., Any], Callable[[], Any]]]


def _parts(place: Place, x: Any) -> Any:
    """What each node has of a tensor."""
    return place.gather(x.detach()) if x.device == place.device else x.detach().cpu()


def _averaging(place: Place) -> tuple[Callable[..., Any], Callable[[], Any]]:
    torch.manual_seed(1)
    with torch.device(place.device):
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    opt = torch.optim.AdamW(net.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        opt.zero_grad()
        loss.backward()
        place.average_(p.grad for p in net.parameters())
        opt.step()
        return place.mean(loss)

    return step, lambda: [_parts(place, p) for p in net.parameters()]


def _collectives(place: Place) -> tuple[Callable[..., Any], Callable[[], Any]]:
    total = torch.zeros(3, 4, device=place.device)

    def step(x: Tensor) -> Any:
        y = x.clone()
        place.all_reduce_(y, "max")
        total.add_(y)
        z = x * 2
        place.broadcast_(z, 1)
        return y, place.all_gather(z), place.reduce_scatter(x), place.mean(x.to(torch.int64)), z

    return step, lambda: _parts(place, total)


def _single_parts(place: Place) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """From the place to its nodes, and from there to the place."""
    counts = [torch.zeros(4, device=each) for each in place]

    def step(x: Tensor) -> Any:
        parts = [x.on(i) for i in place.indices]
        for i, (count, part) in enumerate(zip(counts, parts, strict=True)):
            count.add_(part[0] * (i + 1))
            part.mul_(2)  # it is the same memory
        joined = place.scatter([part[:2] + 1 for part in parts])
        joined.add_(1)
        kept = joined * 2
        return joined, kept.on(1), parts[0], x.sum(), (kept + 1).on(2) - 1

    return step, lambda: [count.cpu() for count in counts]


def _copies(place: Place) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A model in two parts, whose results and gradients go from node to node; and circles."""
    torch.manual_seed(1)
    first, last = nn.Linear(4, 5).to("node:0"), nn.Linear(5, 2).to("node:1")
    opt = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)

    def step(x: Tensor) -> Any:
        part = x.on(0)
        hidden = first(part).relu()
        out = last(hidden.to("node:1"))
        loss = (out.to("node:2") - 1).square().sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        spread = out.detach().to(place.device)
        return loss, spread, (spread + x.sum()).on(2).to("node:0"), hidden.detach().to("node:1")

    return step, lambda: [p.detach().cpu() for p in (*first.parameters(), *last.parameters())]


def _random(place: Place) -> tuple[Callable[..., Any], Callable[[], Any]]:
    def step(x: Tensor) -> Any:
        noise = torch.rand(3, device="node:1")
        return F.dropout(x, 0.5), noise.to("node:2"), torch.randn(2, device=place.device)

    return step, lambda: None


MAKES: dict[str, Make] = {
    "averaging": _averaging, "collectives": _collectives, "parts": _single_parts, "copies": _copies,
    "random": _random,
}  # fmt: skip


@pytest.mark.parametrize("name", MAKES)
def test_a_step_over_several_nodes_is_replayed_as_it_is_done_eagerly(master: Master, name: str) -> None:
    place = master.nodes
    torch.manual_seed(5)
    data = [torch.randn(3, 3, 4) for _ in range(STEPS)]
    results = []
    for recorded in (False, True):
        step, left = MAKES[name](place)
        call: Any = master.recorded(step) if recorded else step
        torch.manual_seed(6)
        returned = []
        for each in data:
            given = call(place.scatter(list(each)))
            returned.append(given if isinstance(given, tuple) else (given,))
        found = [[_parts(place, x) for x in given] for given in returned]
        results.append(copied((found, left())))
        if recorded:
            assert call.replays >= STEPS - 4, call.recordings
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_tensor_of_the_master_goes_to_several_places_in_each_replay(master: Master) -> None:
    place = master.nodes

    @master.recorded
    def step(x: Tensor, y: Tensor) -> Any:
        everywhere, there = x.to(place.device), x.to("node:1")
        return everywhere + y.to(place.device), there * 2, place.replicate(y) * torch.tensor(3.0)

    for value in range(6):
        x, y = torch.full((2,), float(value)), torch.tensor(float(value))
        sums, twice, thrice = step(x, y)
        assert torch.equal(place.gather(sums, 0), torch.full((6,), 2.0 * value))
        assert twice.tolist() == [2.0 * value] * 2
        assert torch.equal(torch.stack(place.gather(thrice)), torch.full((3,), 3.0 * value))
    assert step.replays == 4


def test_results_of_replays_stay_what_they_were(master: Master) -> None:
    place = master.nodes

    @master.recorded
    def step(x: Tensor) -> Any:
        return x + 1, place.mean(x), x.on(2) * 2, place.scatter([x.on(i) * 3 for i in place.indices])

    returned = [step(torch.full((2,), float(value), device=place.device)) for value in range(12)]
    assert step.replays == 10
    for value, (plus, mean, twice, thrice) in enumerate(returned):
        assert torch.equal(torch.stack(place.gather(plus)), torch.full((3, 2), value + 1.0))
        assert mean.tolist() == [value] * 2
        assert twice.tolist() == [value * 2] * 2
        assert torch.equal(torch.stack(place.gather(thrice)), torch.full((3, 2), value * 3.0))


def test_what_fails_on_one_node_of_a_replay_is_poison_where_it_is_eagerly(master: Master) -> None:
    place = master.nodes
    table = torch.arange(4.0, device="node:1")

    def look_up(index: Tensor, x: Tensor) -> Any:
        found = table[index]  # fails here
        sent = found.to("node:2")
        mine = x * 2
        shared = place.scatter([mine.on(0), found, mine.on(2)])
        return sent, mine, place.mean(shared), shared + 1

    step = master.recorded(look_up)
    x = torch.ones(2, device=place.device)
    right, wrong = torch.tensor([1, 2], device="node:1"), torch.tensor([1, 9], device="node:1")
    for _ in range(4):
        step(right, x)
    assert step.replays == 2
    told = []
    for call in (look_up, step):
        sent, mine, mean, shared = call(wrong, x)
        assert torch.equal(place.gather(mine, 0), torch.full((6,), 2.0))
        assert shared.on(0).tolist() == [3, 3]
        for bad in (sent, mean, shared.on(1)):
            with pytest.raises(shoal.RemoteOpError) as caught:
                bad.tolist()
            assert "found = table[index]  # fails here" in caught.value.line
            told.append((caught.value.worker, caught.value.line))
    assert told[:3] == told[3:]
    assert step.replays == 3
    assert step(right, x)[2].tolist() == [pytest.approx(5 / 3), 2]


def test_a_place_that_is_made_in_a_step_is_heard(master: Master) -> None:
    @master.recorded
    def step(x: Tensor) -> Tensor:
        pair = master.place([0, 2])
        y = x.to(pair.device) * 2
        return pair.mean(y)

    for value in range(6):
        assert step(torch.full((2,), float(value), device="node:1")).tolist() == [2.0 * value] * 2
    assert step.replays >= 3
