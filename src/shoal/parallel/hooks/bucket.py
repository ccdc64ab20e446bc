"""The argument of a communication hook: one bucket of gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch

from ...common.wording import counted
from ...future import Future
from ...group import ProcessGroup

T = TypeVar("T")


class GradBucket:
    """The gradients of some parameters of one dtype, which are reduced together.

    The methods are those of ``torch.distributed.GradBucket``, and some for hooks with state from step to step
    (:meth:`indices`, :meth:`kept`, :meth:`memory`, :meth:`as_dtype`).

    Args:
        group: the group of the model.
        index: position in the order of reduction, from 0.
        last: whether this is the last bucket of the pass.
        buffer: all gradients, one-dimensional.
        gradients: a view of ``buffer`` for each parameter, with its shape.
        parameters: the parameters of the gradients.
        indices: the positions of ``parameters`` in the model, equal on all ranks.  Unlike the index of a
            bucket, they do not change when buckets are rebuilt.
    """

    __slots__ = ("_buffer", "_gradients", "_index", "_indices", "_kept", "_last", "_parameters", "group")

    def __init__(
        self,
        group: ProcessGroup,
        index: int,
        last: bool,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        indices: Sequence[int],
    ) -> None:
        self.group = group
        self._index = index
        self._last = last
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._indices = tuple(indices)
        self._kept: dict[Hashable, Any] = {}

    def index(self) -> int:
        """Return the position of this bucket in the order of reduction.

        During the first backward pass that is the reverse order of registration; then buckets are rebuilt,
        and an index may refer to other parameters.
        """
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients, one-dimensional, with gaps of zeros; writable until the next pass."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return a view of :meth:`buffer` for each of :meth:`parameters`, with its shape."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the gradients."""
        return self._parameters

    def indices(self) -> tuple[int, ...]:
        """Return the position of each of :meth:`parameters` in the model, a stable key for state of hooks."""
        return self._indices

    def is_last(self) -> bool:
        """Whether this bucket is the last of the pass."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the gradients by those in ``tensor``: as many elements, any dtype and shape."""
        self._buffer.copy_(tensor.reshape(self._buffer.shape))

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of ``make()`` for ``key``, which is cached until buckets are rebuilt."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(T, self._kept[key])

    def memory(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for messages of a hook: the same tensor in every step, uninitialised in the first.

        It is on the device of the gradients and registered (see :meth:`ProcessGroup.empty`), which makes an
        all-reduce fastest.  New memory in every step would cost more than the all-reduce.

        Args:
            name: a name for this tensor, chosen by the hook.
            count: number of elements.

        Raises:
            OutOfSharedMemory: the tensor does not fit into shared memory.
        """
        return self.kept(("memory", name, count, dtype), lambda: self._empty(count, dtype))

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.group.empty(count, dtype=dtype, device=self._buffer.device)

    def as_dtype(self, dtype: torch.dtype) -> GradBucket:
        """Return a bucket for the same parameters with another dtype, the same object in every step.

        It does not contain the gradients of this bucket; write them with ``set_buffer``.
        """
        return self.kept(("as dtype", dtype), lambda: self._with_dtype(dtype))

    def _with_dtype(self, dtype: torch.dtype) -> GradBucket:
        buffer = self.memory("buffer", len(self._buffer), dtype)
        shift = buffer.storage_offset() - self._buffer.storage_offset()
        gradients = [
            buffer.as_strided(view.shape, view.stride(), view.storage_offset() + shift)
            for view in self._gradients
        ]
        return GradBucket(
            self.group, self._index, self._last, buffer, gradients, self._parameters, self._indices
        )

    def __repr__(self) -> str:
        gradients, elements = len(self._parameters), len(self._buffer)
        return f"<GradBucket {self._index}: {counted(gradients, 'gradient')}, {counted(elements, 'element')}>"


#: Takes the registered state and a bucket; returns a future of the averaged gradients, one tensor with as
#: many elements as the bucket's buffer.
CommHook = Callable[[Any, GradBucket], Future[torch.Tensor]]
