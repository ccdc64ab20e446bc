"""Networks learn on a place of four nodes what they learn with DDP on four ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.controller import Master
from shoal.testing import run_threads
from tests.controller.conftest import Shared
from tests.controller.networks import NETWORKS, with_dropout

COUNT, STEPS = 4, 6


@pytest.fixture(scope="module")
def four(shared: Shared) -> Iterator[Master]:
    shared.close()
    with shoal.init_master_worker(workers=COUNT) as master:
        yield master


def _stepping(
    network: nn.Module, rate: Tensor, reduce: Callable[[Iterable[Any]], None] | None
) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], None]]:
    """A step of training, and what comes after each."""
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    optimizer.param_groups[0]["lr"] = rate  # its constructor looks at the number, and a place has several
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        if reduce is not None:
            reduce(parameter.grad for parameter in network.parameters())
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, schedule.step


def _with_ddp(network: nn.Module, batches: list[Any]) -> list[Any]:
    """The losses of each rank, and its parameters in the end."""

    def rank(group: shoal.ProcessGroup) -> Any:
        model = shoal.DistributedDataParallel(copy.deepcopy(network), group=group)
        step, after = _stepping(model, torch.tensor(0.02, dtype=torch.float64), None)
        losses = []
        for xs, ys in batches:
            losses.append(step(xs[group.rank], ys[group.rank]).item())
            after()
        return losses, [each.detach() for each in model.parameters()]

    return run_threads(rank, COUNT)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("make", NETWORKS)
def test_a_place_of_four_learns_what_four_ranks_learn(four: Master, make: Any, recorded: bool) -> None:
    """In double precision: the ranks reduce buckets, and the nodes all gradients in one message, so what sums
    a part of them, and in which order, may differ.
    """
    torch.manual_seed(0)
    network = with_dropout(make(), 0.0).double()  # ranks are threads, which draw from one generator
    place = four.nodes
    batches = []
    for _ in range(STEPS):
        x, y = make.batch(2 * COUNT)
        batches.append(((x.double() if x.is_floating_point() else x).chunk(COUNT), y.chunk(COUNT)))
    ours = copy.deepcopy(network).to(place.device)
    rate = torch.tensor(0.02, dtype=torch.float64, device=place.device)
    step, after = _stepping(ours, rate, place.average_)
    call: Any = four.recorded(step) if recorded else step
    losses = []
    for xs, ys in batches:
        losses.append(call(place.scatter(list(xs)), place.scatter(list(ys))))
        after()
    assert not recorded or call.replays >= STEPS - 4

    ranks = _with_ddp(network, batches)
    found = [[each.item() for each in place.gather(loss.detach())] for loss in losses]
    for index, (curve, parameters) in enumerate(ranks):
        assert [each[index] for each in found] == pytest.approx(curve, rel=1e-12)
        for mine, theirs in zip(ours.parameters(), parameters, strict=True):
            torch.testing.assert_close(mine.on(index).cpu(), theirs, rtol=1e-10, atol=1e-12)  # type: ignore[attr-defined]
