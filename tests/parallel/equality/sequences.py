"""Recurrent networks and transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .case import Case, Options, case

_TEXT = (
    b"the quick brown fox jumps over the lazy dog; a shoal is many fish that move as one, with no leader, "
    b"and keeps moving when it loses one. pack my box with five dozen liquor jugs."
)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.LSTM(5, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(x)[0])


@case
class Lstm(Case):
    lr = 0.1

    def build(self) -> nn.Module:
        return _Recurrent()

    def batch(self, random: torch.Generator) -> Any:
        inputs = torch.randn(4, 7, 5, generator=random)
        return inputs, torch.sin(inputs.cumsum(1)[..., :2])


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.GRU(5, 10, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.core(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(hidden)


@case
class GruWithPackedSequences(Case):
    """Every rank has sequences of other lengths."""

    lr = 0.1

    def build(self) -> nn.Module:
        return _Packed()

    def batch(self, random: torch.Generator) -> Any:
        inputs = torch.randn(4, 7, 5, generator=random)
        return inputs, torch.randint(1, 8, (4,), generator=random)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, lengths = batch
        mask = torch.arange(7) < lengths[:, None]
        wrong = (model(inputs, lengths) - torch.sin(inputs.cumsum(1)[..., :2])) ** 2
        return (wrong * mask[..., None]).sum() / mask.sum()


class _Encoder(nn.Module):
    """Restores hidden bytes; the output layer is the embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.places = nn.Parameter(0.1 * torch.randn(12, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 32)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(self.embedding(tokens) + self.places))


@case
class TransformerEncoderWithTiedWeights(Case):
    """With dropout: both wrappers leave the random numbers alone.  AdamW obeys a schedule."""

    on_four = True
    options = Options(bucket_cap_mb=0.01)

    def build(self) -> nn.Module:
        return _Encoder()

    def batch(self, random: torch.Generator) -> Any:
        starts = torch.randint(0, len(_TEXT) - 12, (4,), generator=random).tolist()
        whole = torch.tensor([[byte % 31 + 1 for byte in _TEXT[start : start + 12]] for start in starts])
        hidden = torch.rand(whole.shape, generator=random) < 0.2
        hidden[:, 3] = True
        return whole.masked_fill(hidden, 0), whole, hidden

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        tokens, whole, hidden = batch
        return functional.cross_entropy(model(tokens)[hidden], whole[hidden])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # A large epsilon: where gradients are next to nothing, AdamW would make much of their rounding.
        return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-3)

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], steps: int
    ) -> list[float]:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        losses = []
        for number in range(steps):
            losses.append(self.step(model, optimizer, batches[number % len(batches)], number).item())
            schedule.step()
        return losses


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))


class _Decoder(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.places = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(_Block(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@case
class ByteLanguageModel(Case):
    """A decoder with causal attention."""

    lr = 0.1
    options = Options(bucket_cap_mb=0.01)

    def build(self) -> nn.Module:
        return _Decoder()

    def batch(self, random: torch.Generator) -> Any:
        starts = torch.randint(0, len(_TEXT) - 17, (4,), generator=random).tolist()
        return torch.tensor([list(_TEXT[start : start + 17]) for start in starts])

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
