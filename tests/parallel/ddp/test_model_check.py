"""Ranks that wrap different models are told what differs, on every rank, before anything is reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import shoal
from tests.parallel.training import told_alike, wrapped


def _message(make: Callable[[int], nn.Module], size: int = 3, **options: Callable[[int], object]) -> str:
    """What every rank is told, which must be the same but for who says it."""

    def wrap(group: shoal.ProcessGroup) -> None:
        own = {name: choose(group.rank) for name, choose in options.items()}
        wrapped(group, make(group.rank), **own)

    return told_alike(wrap, size)


def test_another_shape_is_reported_with_rank_and_parameter() -> None:
    message = _message(lambda rank: nn.Sequential(nn.Linear(4, 5 if rank == 2 else 6)))
    assert "rank 2: parameter '0.weight' is float32 [5, 4], requires grad, but float32 [6, 4]" in message
    assert "rank 2: parameter '0.bias'" in message
    assert "rank 1" not in message


def test_another_dtype_is_reported() -> None:
    message = _message(lambda rank: nn.Linear(2, 2, dtype=torch.float64 if rank == 1 else torch.float32))
    assert "rank 1: parameter 'weight' is float64 [2, 2], requires grad, but float32" in message


def test_a_parameter_frozen_on_one_rank_is_reported() -> None:
    def make(rank: int) -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.bias.requires_grad_(rank != 1)
        return layer

    assert "rank 1: parameter 'bias' is float32 [2], frozen, but float32 [2], requires grad" in _message(make)


def test_missing_and_additional_parameters_are_reported() -> None:
    message = _message(lambda rank: nn.Linear(2, 2, bias=rank != 1))
    assert "rank 1: parameter 'bias' is missing, float32 [2], requires grad on rank 0" in message
    message = _message(lambda rank: nn.Linear(2, 2, bias=rank == 1))
    assert "rank 1: parameter 'bias' (float32 [2], requires grad) does not exist on rank 0" in message


def test_another_order_of_registration_is_reported() -> None:
    def make(rank: int) -> nn.Module:
        names = ["a", "b"] if rank != 1 else ["b", "a"]
        return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})

    assert "rank 1: parameter 'b.weight' is registered where rank 0 has parameter 'a.weight'" in _message(
        make
    )


def test_another_memory_layout_is_reported() -> None:
    def make(rank: int) -> nn.Module:
        layer = nn.Conv2d(2, 2, 3)
        return layer.to(memory_format=torch.channels_last) if rank == 1 else layer

    assert "rank 1: parameter 'weight' is float32 [2, 2, 3, 3] with strides [18, 1, 6, 2]" in _message(make)


def test_buffers_and_options_are_compared_too() -> None:
    message = _message(
        lambda rank: nn.Sequential(
            nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False).to([torch.float32, torch.float64][rank])
        ),
        2,
    )
    assert "rank 1: buffer '1.running_mean' is float64 [2], but float32 [2] on rank 0" in message
    message = _message(lambda _: nn.Linear(2, 2), 2, bucket_cap_mb=lambda rank: 1 + rank)
    assert "rank 1: option bucket_cap_mb is 2, but 1 on rank 0" in message


def test_a_long_list_of_differences_is_cut() -> None:
    message = _message(lambda rank: nn.Sequential(*(nn.Linear(2, 2 + rank) for _ in range(8))), 2)
    assert message.count("rank 1:") == 6
    assert "rank 1: and 11 more differences" in message
