"""Gradients in eight bits: off by at most half a step of each rank's range."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.parallel import hooks
from shoal.testing import run_threads
from tests.parallel.training import on_ranks

from .buckets import SHAPES, Model, gradient, same_on_all


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, torch.float64), (2, torch.float32), (2, torch.float64), (4, torch.bfloat16)]
)
def test_the_mean_is_off_by_at_most_the_mean_range_over_510(size: int, dtype: torch.dtype) -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, count=2, dtype=dtype)
        own = model.reduce(hooks.quantization_pertensor_hook)
        local = [gradient(group.rank, 0, i, p.shape) for i, p in enumerate(model.parameters)]
        low = [min(float(x.min()) for x in part) for part in (local[:5], local[5:])]
        high = [max(float(x.max()) for x in part) for part in (local[:5], local[5:])]
        return own, model.mean(), [b - a for a, b in zip(low, high, strict=True)]

    results = run_threads(rank, size)
    averaged = same_on_all([own for own, _, _ in results])
    rounding = 2**-8 if dtype is torch.bfloat16 else 1e-6
    for index, (own, mean) in enumerate(zip(averaged, results[0][1], strict=True)):
        step = sum(ranges[index // 5] for _, _, ranges in results) / size / 255
        assert float((own - mean).abs().max()) <= step / 2 + 4 * rounding


@pytest.mark.parametrize("channel", [1, 7, 512, 5000])
def test_channels_make_it_more_precise_whatever_their_size(channel: int) -> None:
    def uneven(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
        return gradient(rank, step, index, shape) * 10.0**-index

    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, gradients=uneven)
        hook = partial(hooks.quantization_perchannel_hook, bucket_size=channel)
        return model.reduce(hook), model.mean(), model.reduce(hooks.quantization_pertensor_hook)

    results = run_threads(rank, 2)
    averaged = same_on_all([own for own, _, _ in results])
    for own, mean in zip(averaged, results[0][1], strict=True):
        # Neighbours of another parameter may share a channel, but never when each has its own.
        bound = 1e-6 if channel == 1 else 0.05
        assert float((own - mean).abs().max()) <= bound


def test_channels_keep_small_gradients_that_one_range_for_all_loses() -> None:
    shapes = [(512,), (512,)]

    def uneven(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
        return gradient(rank, step, index, shape) * (1000.0 if index == 0 else 0.001)

    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, shapes=shapes, gap=0, gradients=uneven)
        whole = model.reduce(hooks.quantization_pertensor_hook)[1]
        channels = model.reduce(hooks.quantization_perchannel_hook)[1]
        return float(whole.abs().max()), float((channels - model.mean()[1]).abs().max())

    for lost, error in run_threads(rank, 2):
        assert lost == 0
        assert error < 0.003 * 0.01


def test_it_agrees_with_the_mapping_of_torch() -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, gap=0)
        return torch.cat([own.flatten() for own in model.reduce(hooks.quantization_pertensor_hook)])

    (own,) = run_threads(rank, 1)
    flat = torch.cat([gradient(0, 0, i, torch.Size(s)).float().flatten() for i, s in enumerate(SHAPES)])
    low, high = flat.min(), flat.max()
    scale = float((high - low) / 255)
    zero = round(float(-low) / scale)
    expected = torch.fake_quantize_per_tensor_affine(flat, scale, zero, 0, 255)
    # A value in the middle between two steps may go to either.
    assert float((own - expected).abs().max()) <= scale * 1.001
    assert float((own - expected).abs().gt(1e-5).float().mean()) < 0.01


@on_ranks(2)
def test_zeros_stay_zeros_and_equal_values_stay_themselves(group: shoal.ProcessGroup) -> None:
    def constant(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
        return torch.full(shape, (0.0, -3.5, 1e-30)[step], dtype=torch.float64)

    model = Model(group, gradients=constant)
    for expected in (0.0, -3.5, 1e-30):
        for own in model.reduce(hooks.quantization_perchannel_hook):
            torch.testing.assert_close(own, torch.full_like(own, expected), rtol=1e-6, atol=0)
        (bucket,) = model.buckets
        assert bucket.buffer()[-1] == 0  # a gap


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_what_is_not_finite_on_one_rank_is_seen_on_all(bad: float) -> None:
    def broken(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
        x = gradient(rank, step, index, shape)
        return torch.full_like(x, bad) if rank == 1 and index == 2 else x

    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, gradients=broken)
        return [bool(own.isfinite().all()) for own in model.reduce(hooks.quantization_pertensor_hook)]

    for sound in run_threads(rank, 2):
        assert not sound[2]


@on_ranks(1)
def test_bad_sizes_and_complex_gradients_are_refused(group: shoal.ProcessGroup) -> None:
    with pytest.raises(shoal.UsageError, match="bucket_size must be a positive number of gradients, got 0"):
        hooks.quantization_perchannel_hook(None, Model(group).buckets[0], 0)
    (bucket,) = Model(group, dtype=torch.complex64).buckets
    with pytest.raises(shoal.UsageError, match=r"torch\.complex64 have no order"):
        hooks.quantization_pertensor_hook(None, bucket)
