"""Buckets made by hand, as the reducer would make them, with gradients that every rank can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import shoal
from shoal.parallel.hooks import CommHook, GradBucket

#: Of the parameters of a bucket: matrices, a vector, a scalar, a kernel whose channels are innermost.
SHAPES = ((24, 40), (40,), (16, 24), (), (6, 4, 3, 3))

#: What a rank's gradients are in a step, for a parameter with this index.
Gradients = Callable[[int, int, int, torch.Size], torch.Tensor]


def gradient(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
    """Normal numbers in double precision: equal wherever they are asked for, different for all arguments."""
    random = torch.Generator().manual_seed(((rank * 100) + step) * 1000 + index)
    return torch.randn(shape, generator=random, dtype=torch.float64)


class Model:
    """The buckets of a model of ``len(shapes)`` parameters a bucket, on one rank.

    Args:
        count: how many buckets.
        gap: elements of zero after each gradient.
    """

    def __init__(
        self,
        group: shoal.ProcessGroup,
        count: int = 1,
        shapes: Sequence[Sequence[int]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        gap: int = 3,
        gradients: Gradients = gradient,
    ) -> None:
        self.group = group
        self.step = -1
        self._gradients = gradients
        self.parameters: list[torch.Tensor] = []
        self.buckets: list[GradBucket] = []
        for number in range(count):
            parameters = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
            buffer = group.empty(sum(p.numel() + gap for p in parameters), dtype=dtype).zero_()
            views, start = [], 0
            for parameter in parameters:
                strides = parameter.stride()
                if parameter.dim() == 4:
                    strides = torch.empty_like(parameter, memory_format=torch.channels_last).stride()
                views.append(buffer.as_strided(parameter.shape, strides, buffer.storage_offset() + start))
                start += parameter.numel() + gap
            indices = range(len(self.parameters), len(self.parameters) + len(parameters))
            self.buckets.append(
                GradBucket(group, number, number == count - 1, buffer, views, parameters, indices)
            )
            self.parameters += parameters

    def compute(self) -> None:
        """Put the gradients of the next step into the buckets."""
        self.step += 1
        for bucket in self.buckets:
            for index, view in zip(bucket.indices(), bucket.gradients(), strict=True):
                view.copy_(self._gradients(self.group.rank, self.step, index, view.shape))

    def reduce(self, hook: CommHook, state: object = None) -> list[torch.Tensor]:
        """All gradients after ``hook`` has reduced every bucket; all are started before any is waited for."""
        self.compute()
        futures = [hook(state, bucket) for bucket in self.buckets]
        for future, bucket in zip(reversed(futures), reversed(self.buckets), strict=True):
            value = future.wait()
            value = value[0] if isinstance(value, list) else value
            bucket.set_buffer(value)
        return [view.to(torch.float64, copy=True) for bucket in self.buckets for view in bucket.gradients()]

    def mean(self, ranks: int | None = None) -> list[torch.Tensor]:
        """The mean of the gradients of this step over all ranks, in double precision."""
        size = ranks or self.group.size
        return [
            sum(self._gradients(rank, self.step, index, p.shape) for rank in range(size)) / size
            for index, p in enumerate(self.parameters)
        ]


def same_on_all(results: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """The tensors that each rank has, once it is clear that they are bitwise equal."""
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return results[0]


def norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


def count_sent(group: shoal.ProcessGroup) -> list[int]:
    """The elements of each all-reduce of this group from now on."""
    sent: list[int] = []
    all_reduce = group.all_reduce

    def counted(x: torch.Tensor, *args: Any, **how: Any) -> Any:
        sent.append(x.numel())
        return all_reduce(x, *args, **how)

    group.all_reduce = counted  # type: ignore[method-assign]
    return sent
