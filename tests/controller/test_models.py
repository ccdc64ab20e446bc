"""Whole networks learn on a node exactly what they learn here: every loss of the curve is the same number."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.controller import Master
from tests.controller.compare import differences
from tests.controller.networks import NETWORKS, with_dropout

NODE = "node:0"
STEPS = 12
#: of the long form
MANY = 60


def _saved_and_loaded(network: nn.Module, others: list[Any], device: str) -> None:
    """Save everything, spoil the network, and load what was saved."""
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (network, *others)], file)
    file.seek(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    for each, state in zip((network, *others), torch.load(file, map_location=device), strict=True):
        each.load_state_dict(state)


def _train(
    make: Any, device: str, rate: Any, master: Master | None, steps: int, dropout: float
) -> tuple[list[Any], nn.Module, dict[str, Any]]:
    """Losses and norms of a curve, the network, the optimiser's state; with a master, of recorded steps."""
    torch.manual_seed(0)
    network = with_dropout(make(), dropout).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return loss, norm

    call: Any = step if master is None else master.recorded(step)
    batches = [make.batch() for _ in range(steps)]
    torch.manual_seed(1)
    curve = []
    for number, (x, y) in enumerate(batches):
        loss, norm = call(x.to(device), y.to(device))
        curve.append((loss.detach(), norm))
        schedule.step()
        if number == steps // 2:
            _saved_and_loaded(network, [optimizer, schedule], device)
    assert master is None or call.replays >= steps - 8
    return curve, network, optimizer.state_dict()["state"]


def _compared(master: Master, make: Any, recorded: bool, steps: int = STEPS, dropout: float = 0.1) -> None:
    """A rate that a scheduler changes is a number, and for a recorded step a tensor of the node."""
    rates = [torch.tensor(0.02, device=each) if recorded else 0.02 for each in ("cpu", NODE)]
    here, network, state = _train(make, "cpu", rates[0], None, steps, dropout)
    there, remote, moved = _train(make, NODE, rates[1], master if recorded else None, steps, dropout)
    assert not differences(master, [each for each, _ in here], [each for each, _ in there])
    assert not differences(master, (here, state), (there, moved))
    assert not differences(master, dict(network.state_dict()), dict(remote.state_dict()))
    assert len(list(remote.parameters())) == len(list(network.parameters()))  # tied ones stay tied

    x, _ = make.batch()
    with torch.no_grad():
        assert not differences(master, deepcopy(network).eval()(x), deepcopy(remote).eval()(x.to(NODE)))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("make", NETWORKS)
def test_a_network_learns_on_a_node_what_it_learns_here(master: Master, make: type, recorded: bool) -> None:
    _compared(master, make, recorded)


@pytest.mark.stress
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("make", NETWORKS)
def test_a_long_curve_is_the_same(master: Master, make: type, recorded: bool, dropout: float) -> None:
    _compared(master, make, recorded, MANY, dropout)
