"""DistributedDataParallel: the module wrapper around the reducer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError
from ..group import ProcessGroup
from .model_check import check_same_model
from .parcel import Parcel, broadcast_all
from .reducer import Reducer


class DistributedDataParallel(nn.Module):
    """Trains one model on several ranks: each computes gradients of its part of a batch, all get the mean.

    Wrap the model on every rank, and build the optimiser from the wrapped parameters or the module's own
    (they are the same).  Wrapping is collective: it checks that all ranks hold the same model and gives all
    of them rank 0's parameters and buffers.  Where the loss is a mean over equally large parts of a batch,
    training equals that of a single process with the whole batch, up to rounding.

    Gradients are averaged while backward still runs, bucket by bucket; after ``backward()`` returns,
    ``parameter.grad`` holds the average, as a view of a bucket in the group's shared memory.

    A forward pass communicates only to make buffers equal to rank 0's: before the first forward of a step, in
    training mode, with gradients enabled and outside :meth:`no_sync`.  Any rank may run others by itself, to
    evaluate for instance.

    Args:
        module: the model.  Its parameters must not be replaced after wrapping.
        group: the ranks to train on.
        bucket_cap_mb: largest bucket in MiB.  A smaller one starts communication earlier, a larger one makes
            it more efficient.
        broadcast_buffers: make buffers (running statistics, for instance) equal to rank 0's at every step.
            The initial values are rank 0's in any case.

    Attributes:
        module: the model, as given.
        group: the ranks.

    Raises:
        ModelMismatch: the ranks' models differ; the message says how.
        UsageError: there is nothing to train.
        OutOfSharedMemory: the buckets do not fit.

    ``backward()`` on an output raises UnusedParameterError on every rank if a parameter of any rank got no
    gradient, and the GroupErrors that ``ProcessGroup.all_reduce`` may raise.  See ``docs/data-parallel.md``.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        *,
        group: ProcessGroup,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        if not bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
        cap = max(1, int(bucket_cap_mb * 2**20))
        check_same_model(
            group, module, {"bucket_cap_mb": bucket_cap_mb, "broadcast_buffers": broadcast_buffers}
        )
        _check_trainable(module)
        self.module = module
        self.group = group
        broadcast_all(group, [*module.parameters(), *module.buffers()])
        trained = [
            (name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad
        ]
        self._reducer = Reducer(
            group, [name for name, _ in trained], [parameter for _, parameter in trained], cap=cap
        )
        self._buffers_in_step = _BufferSync(group, module) if broadcast_buffers else None
        self._synchronised = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``module`` returns.  With gradients enabled, the backward pass through it will be reduced."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if not self._synchronised:
            self._reducer.ignore()
            return self.module(*args, **kwargs)
        if self._reducer.in_backward():
            return self.module(*args, **kwargs)
        self._reducer.settle()
        if self.training and self._buffers_in_step is not None:
            self._buffers_in_step.refresh(self._reducer.passes)
        output = self.module(*args, **kwargs)
        self._reducer.expect(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context forward and backward passes stay local: gradients accumulate on each rank.

        The first backward pass whose forward ran outside reduces the sum.  It is the forward pass that must
        run within the context.
        """
        before = self._synchronised
        self._synchronised = False
        try:
            yield
        finally:
            self._synchronised = before


class _BufferSync:
    """Keeps the buffers of a module equal to rank 0's."""

    def __init__(self, group: ProcessGroup, module: nn.Module) -> None:
        self._group = group
        # The places and not the tensors: a module may replace its buffer at any time.
        self._places: list[tuple[dict[str, torch.Tensor | None], str]] = []
        seen: set[int] = set()
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((owner._buffers, name))
        self._sent: list[torch.Tensor] = []
        self._parcel: Parcel | None = None
        self._step = -1

    def refresh(self, step: int) -> None:
        """Broadcast rank 0's buffers, unless that was done in this ``step``.

        Only once a step: autograd may hold the buffers of the step's first forward pass, and would refuse to
        go back through tensors that were written to since.
        """
        if step == self._step or not self._places:
            return
        tensors = [buffer for owner, name in self._places if (buffer := owner.get(name)) is not None]
        if len(tensors) != len(self._sent) or any(
            a is not b for a, b in zip(tensors, self._sent, strict=True)
        ):
            self._parcel = None
        if self._parcel is None:
            self._parcel = Parcel(self._group, tensors)
            self._sent = tensors
        self._parcel.broadcast(tensors)
        self._step = step


def _check_trainable(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet; run a forward pass through the module before wrapping"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UsageError(
            f"no parameter of {type(module).__name__} requires a gradient: there is nothing to train, and "
            "the module can be used as it is"
        )
