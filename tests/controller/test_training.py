"""Networks learn on a node exactly what they learn here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.controller import Master

NODE = "node:0"


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(8, device=x.device)
        y = self.layer(self.embedding(x.unsqueeze(-1)), src_mask=mask, is_causal=True)
        return self.head(y.mean(1))  # type: ignore[no-any-return]


def _losses(make: Callable[[], nn.Module], optimiser: Callable[..., Any], device: str) -> list[float]:
    torch.manual_seed(1)
    net = make().to(device)
    opt = optimiser(net.parameters())
    x, y = torch.randn(6, 8).to(device), torch.randint(0, 4, (6,)).to(device)
    losses = []
    for _ in range(4):
        torch.manual_seed(2)
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("make", [_mlp, _conv, _Attention])
def test_a_loss_curve_is_that_of_the_cpu_bit_by_bit(master: Master, make: Callable[[], nn.Module]) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    assert _losses(make, sgd, NODE) == _losses(make, sgd, "cpu")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_learn_the_same_to_rounding(
    master: Master, layer: Callable[..., nn.Module], bias: bool
) -> None:
    """On the CPU torch may run a whole layer as one operation, which rounds differently."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(1, 6, num_layers=2, batch_first=True, bias=bias)
            self.head = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x.unsqueeze(-1))[0][:, -1])  # type: ignore[no-any-return]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    assert _losses(Net, sgd, NODE) == pytest.approx(_losses(Net, sgd, "cpu"), rel=1e-5)


@pytest.mark.parametrize(
    "settings", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"]
)
@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.AdamW])
def test_optimisers_make_the_same_steps(
    master: Master, optimiser: Callable[..., Any], settings: dict[str, bool]
) -> None:
    def make(parameters: Any) -> Any:
        return optimiser(parameters, lr=0.01, **settings)

    assert _losses(_mlp, make, NODE) == _losses(_mlp, make, "cpu")
