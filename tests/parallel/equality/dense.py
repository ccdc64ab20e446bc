"""Perceptrons and convolutional networks, and what is done to their parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from .case import Case, Options, case, regression, variant

#: Options that give every model here several buckets.
SMALL = Options(bucket_cap_mb=0.004)


def perceptron(width: int = 24, depth: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(6, width), nn.Tanh()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


class OnVectors(Case):
    """A perceptron."""

    def build(self) -> nn.Module:
        return perceptron()

    def batch(self, random: torch.Generator) -> Any:
        return regression(random, 6)


class OnImages(Case):
    lr = 0.02

    def batch(self, random: torch.Generator) -> Any:
        return regression(random, 3, 8, 8)


variant("perceptron", OnVectors)
variant("perceptron_in_many_buckets", OnVectors, lambda: perceptron(depth=8), options=SMALL, on_four=True)
variant(
    "perceptron_with_copied_gradients", OnVectors, options=Options(**SMALL, gradient_as_bucket_view=False)
)


@case
class ConvolutionsWithBatchNorm(OnImages):
    """Running statistics are buffers: every step begins with rank 0's."""

    on_four = True

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, 3),
        )


variant(
    "batch_norm_with_buffers_of_its_own", ConvolutionsWithBatchNorm, options=Options(broadcast_buffers=False)
)


@case
class ConvolutionsInChannelsLast(OnImages):
    def build(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.Conv2d(6, 8, 3, stride=2, groups=2),
            nn.GroupNorm(4, 8),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(72, 3),
        )
        return model.to(memory_format=torch.channels_last)

    def batch(self, random: torch.Generator) -> Any:
        inputs, targets = super().batch(random)
        return inputs.to(memory_format=torch.channels_last), targets


def normed(norm: Any) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(6, 16)), nn.Tanh(), norm(nn.Linear(16, 3)))


variant("weight_norm", OnVectors, lambda: normed(parametrizations.weight_norm))
# Its power iteration keeps buffers and changes them in every forward pass.
variant("spectral_norm", OnVectors, lambda: normed(parametrizations.spectral_norm))


@case
class FrozenLayers(OnVectors):
    """Some parameters and one whole layer are not trained."""

    def build(self) -> nn.Module:
        model = perceptron()
        model[2].requires_grad_(False)
        model[0].bias.requires_grad_(False)
        return model


class _Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(6, 12, dtype=torch.complex64) / 3)
        self.out = nn.Parameter(torch.randn(12, 3, dtype=torch.complex64) / 4)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x.to(self.into.dtype) @ self.into)
        return (hidden @ self.out).real + self.shift


variant("complex_parameters", OnVectors, _Waves, lr=0.005)
