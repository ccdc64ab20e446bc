"""What a communication hook is given: one bucket of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...future import Future
from ...group import ProcessGroup


class GradBucket:
    """The gradients of some parameters of one dtype, which are reduced together.

    Args:
        group: the ranks of the model.
        index: 0 for the bucket that is reduced first.
        last: whether no other bucket follows in this pass.
        buffer: all gradients, one-dimensional.
        gradients: a view of ``buffer`` for each parameter, shaped like it.
        parameters: those that the gradients belong to.

    The methods are those of ``torch.distributed.GradBucket``.
    """

    __slots__ = ("_buffer", "_gradients", "_index", "_last", "_parameters", "group")

    def __init__(
        self,
        group: ProcessGroup,
        index: int,
        last: bool,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self.group = group
        self._index = index
        self._last = last
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)

    def index(self) -> int:
        """The place of this bucket in the order of reduction.

        Until the first backward pass is complete, the order is the reverse of registration; then buckets are
        made anew, and an index may stand for other parameters.
        """
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, one-dimensional, with gaps of zeros between them.  It may be written to."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """A view of :meth:`buffer` for each of :meth:`parameters`, shaped like it."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients these are."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether this bucket is the last of the pass."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put other gradients in the place of these.

        Args:
            tensor: as many elements as :meth:`buffer`; any dtype and shape.
        """
        self._buffer.copy_(tensor.reshape(self._buffer.shape))

    def __repr__(self) -> str:
        return f"<GradBucket {self._index}: {len(self._parameters)} gradients, {len(self._buffer)} elements>"


#: Takes the state given with it and a bucket, returns a future of the averaged gradients: one tensor with as
#: many elements as the bucket's buffer.
CommHook = Callable[[Any, GradBucket], Future[torch.Tensor]]
