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

    Args:
        group: the ranks of the model.
        index: 0 for the bucket that is reduced first.
        last: whether no other bucket follows in this pass.
        buffer: all gradients, one-dimensional.
        gradients: a view of ``buffer`` for each parameter, shaped like it.
        parameters: those that the gradients belong to.
        indices: the places of ``parameters`` in the model, equal on all ranks.  Unlike the index of a bucket
            they stay what they are when buckets are made anew.

    The methods are those of ``torch.distributed.GradBucket``, and a few more for hooks that keep something
    from step to step (:meth:`indices`, :meth:`kept`, :meth:`memory`, :meth:`as_dtype`).
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
        """The place of this bucket in the order of reduction.

        Until the first backward pass is complete, the order is the reverse of registration; then buckets are
        made anew, and an index may stand for other parameters.
        """
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, one-dimensional, with gaps of zeros between them.  It may be written to.

        The next pass overwrites it: copy what is to be kept.
        """
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """A view of :meth:`buffer` for each of :meth:`parameters`, shaped like it."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients these are."""
        return self._parameters

    def indices(self) -> tuple[int, ...]:
        """For each of :meth:`parameters` its place in the model: what a hook remembers of it goes by this."""
        return self._indices

    def is_last(self) -> bool:
        """Whether this bucket is the last of the pass."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put other gradients in the place of these.

        Args:
            tensor: as many elements as :meth:`buffer`; any dtype and shape.
        """
        self._buffer.copy_(tensor.reshape(self._buffer.shape))

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of ``make()`` when ``key`` was first asked for; kept until buckets are made anew."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(T, self._kept[key])

    def memory(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a hook to send from, on the device of the gradients: the same tensor in every step,
        uninitialised in the first.

        It is registered memory (see :meth:`ProcessGroup.empty`), in which an all-reduce is fastest; fresh
        memory in every step would cost more than the all-reduce.

        Args:
            name: of this piece, of the hook's choice.
            count: elements.

        Raises:
            OutOfSharedMemory: there is none left.
        """
        return self.kept(("memory", name, count, dtype), lambda: self._empty(count, dtype))

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.group.empty(count, dtype=dtype, device=self._buffer.device)

    def as_dtype(self, dtype: torch.dtype) -> GradBucket:
        """The same bucket with gradients of another dtype, the same object in every step.

        Its gradients are those that were last put there (with ``set_buffer``), not those of this bucket.
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


#: Takes the state given with it and a bucket, returns a future of the averaged gradients: one tensor with as
#: many elements as the bucket's buffer.
CommHook = Callable[[Any, GradBucket], Future[torch.Tensor]]
