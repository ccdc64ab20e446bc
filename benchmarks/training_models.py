"""The models of ``training.py``, with their batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BYTES = 256  # vocabulary of models of bytes


@dataclass(frozen=True)
class Task:
    """A training task; ``batch`` creates one rank's input and target."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.mse_loss


class Transformer(nn.Module):
    """A causal transformer over bytes; maps [batch, context] indices to [batch * context, BYTES] logits."""

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 6, context: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)
        # Not a buffer: DDP would broadcast it in every step.
        self.mask = nn.Transformer.generate_square_subsequent_mask(context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) + self.position
        return self.head(self.norm(self.blocks(hidden, mask=self.mask, is_causal=True))).flatten(0, 1)


def _chain(layers: int, width: int, *, relu: bool) -> nn.Sequential:
    """Linear layers initialized such that gradients neither grow nor vanish.

    With torch's initialization the gradients of the first layers would be denormal numbers, on which CPUs are
    slow, and the benchmark would measure that.
    """
    chain = nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(width, width)
        nn.init.orthogonal_(linear.weight, gain=2**0.5 if relu else 1.0)
        chain.append(linear)
        if relu:
            chain.append(nn.ReLU())
    return chain


def _vectors(batch: int, width: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (torch.randn(batch, width), torch.randn(batch, width))


def _text(batch: int, context: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(BYTES, (batch, context + 1))
        return text[:, :-1].contiguous(), text[:, 1:].flatten()

    return draw


TASKS = {
    "mlp": Task("MLP, 6 x 1024", lambda: _chain(6, 1024, relu=True), _vectors(128, 1024)),
    "layers": Task("200 layers of 64", lambda: _chain(200, 64, relu=True), _vectors(32, 64)),
    "transformer": Task("transformer, 10.9 million", Transformer, _text(4, 128), cross_entropy),
    "parameters": Task("1,000 parameters", lambda: _chain(500, 8, relu=False), _vectors(8, 8)),
    "tiny": Task("a tiny model", lambda: _chain(3, 16, relu=True), _vectors(4, 16)),
}
