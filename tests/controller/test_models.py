"""Whole networks learn on a node exactly what they learn here: every loss of the curve is the same number."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.controller import Master
from tests.controller.compare import differences

NODE = "node:0"
STEPS = 12
#: what a batch is made of, and the loss of a network for it
_Batches = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class DigitsNetwork(nn.Module):
    """Two convolutions over pictures of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Dropout(0.25), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        digits = torch.randint(0, 10, (16,))
        pictures = torch.randn(16, 1, 8, 8) + (digits / 5 - 1).reshape(-1, 1, 1, 1)
        return pictures, digits


class LanguageModel(nn.Module):
    """A decoder of two layers whose output has the weights of its embedding."""

    WORDS, WIDTH, LENGTH = 23, 16, 12

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(self.WORDS, self.WIDTH)
        self.places = nn.Parameter(torch.randn(self.LENGTH, self.WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            self.WIDTH, 4, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(self.WIDTH, self.WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.words(x) + self.places[: x.shape[1]]
        return self.out(self.layers(hidden, mask=mask, is_causal=True)).flatten(0, 1)  # type: ignore[no-any-return]

    @classmethod
    def batch(cls) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.arange(cls.LENGTH + 1) * torch.randint(1, 5, (6, 1)) % cls.WORDS
        return text[:, :-1], text[:, 1:].flatten()


class Recurrent(nn.Module):
    """Two layers of LSTM over sequences of which one is shorter, and a GRU over what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x)
        _, last = self.gru(hidden)
        return self.head(last[-1])  # type: ignore[no-any-return]

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(5, 7, 3)
        return x, x.sum((1, 2)).abs().long() % 4


def _train(
    make: Callable[[], nn.Module], batch: _Batches, device: str
) -> tuple[list[torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    network = make().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x, y = (each.to(device) for each in batch())
        torch.manual_seed(step)
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return losses, network


@pytest.mark.parametrize("make", [DigitsNetwork, LanguageModel, Recurrent])
def test_a_network_learns_on_a_node_what_it_learns_here(master: Master, make: type) -> None:
    here, network = _train(make, make.batch, "cpu")  # type: ignore[attr-defined]
    there, remote = _train(make, make.batch, NODE)  # type: ignore[attr-defined]
    assert not differences(master, here, there)
    assert not differences(master, dict(network.state_dict()), dict(remote.state_dict()))
    assert here[-1] < here[0]
    assert len(list(remote.parameters())) == len(list(network.parameters()))  # tied ones stay tied

    x, _ = make.batch()  # type: ignore[attr-defined]
    with torch.no_grad():
        assert not differences(master, deepcopy(network).eval()(x), deepcopy(remote).eval()(x.to(NODE)))
