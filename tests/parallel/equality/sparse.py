"""Embeddings whose gradients are sparse: every rank has other rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .case import Case, case


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.hints = nn.EmbeddingBag(20, 8, mode="mean")
        self.head = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))

    def forward(self, words: torch.Tensor, starts: torch.Tensor, hints: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.words(words, starts), self.hints(hints)], 1))


@case
class SparseEmbedding(Case):
    """The whole model is one embedding with sparse gradients, and a head."""

    lr = 0.5

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(60, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def batch(self, random: torch.Generator) -> Any:
        words = torch.randint(0, 60, (6, 3), generator=random)
        return words, words.sum(1) % 4

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        words, kinds = batch
        return functional.cross_entropy(model(words), kinds)


@case
class SparseAndDenseBags(Case):
    """Ranks have different numbers of rows and of words in them, sometimes no words at all."""

    on_four = True
    distinct = 7

    def build(self) -> nn.Module:
        return _Bag()

    def batch(self, random: torch.Generator) -> Any:
        rows = 3 + self.rank
        lengths = torch.randint(0, 5, (rows,), generator=random)
        if torch.rand((), generator=random) < 0.25:
            lengths.zero_()
        words = torch.randint(0, 50, (int(lengths.sum()),), generator=random)
        hints = torch.randint(0, 20, (rows, 2), generator=random)
        return words, lengths.cumsum(0) - lengths, hints, (lengths + hints[:, 0]) % 4

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-3)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        *inputs, kinds = batch
        return functional.cross_entropy(model(*inputs), kinds)


@case
class AccumulatedSparseGradients(SparseEmbedding):
    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> torch.Tensor:
        optimizer.zero_grad()
        words, kinds = batch
        with model.no_sync():
            self.loss(model, (words[:2], kinds[:2]), step).backward()
        loss = self.loss(model, (words[2:], kinds[2:]), step)
        loss.backward()
        optimizer.step()
        return loss
