"""Operators of a program's own, which nodes know when they have imported this module."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("shoal_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    """It has a kernel for metadata, and a formula for its gradient."""
    return x * by


@scaled.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.by = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return scaled(grad, ctx.by), None


scaled.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("shoal_test::positives", mutates_args=())
def positives(x: torch.Tensor) -> torch.Tensor:
    """Only a node knows the shape of its result."""
    return x[x > 0].clone()


@torch.library.custom_op("shoal_test::halve_", mutates_args=("x",))
def halve_(x: torch.Tensor) -> None:
    """It writes to its argument."""
    x.mul_(0.5)
