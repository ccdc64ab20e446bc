"""The interface of communication hooks: their argument, their result, and the checks of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch

from ...common.formatting import counted
from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ...group.group_argument import backend_of, not_a_shoal_group, unwrap_group
from ..coalesced import views_in

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
        with torch.no_grad():
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
        device = self._buffer.device
        return self.kept(
            ("memory", name, count, dtype), lambda: self.group.empty(count, dtype=dtype, device=device)
        )

    def as_dtype(self, dtype: torch.dtype) -> GradBucket:
        """Return a bucket for the same parameters with another dtype, the same object in every step.

        It does not contain the gradients of this bucket; write them with ``set_buffer``.
        """
        return self.kept(("as dtype", dtype), lambda: self._with_dtype(dtype))

    def _with_dtype(self, dtype: torch.dtype) -> GradBucket:
        buffer = self.memory("buffer", len(self._buffer), dtype)
        gradients = views_in(buffer, self._buffer, self._gradients)
        return GradBucket(
            self.group, self._index, self._last, buffer, gradients, self._parameters, self._indices
        )

    def __repr__(self) -> str:
        gradients, elements = len(self._parameters), len(self._buffer)
        return f"<GradBucket {self._index}: {counted(gradients, 'gradient')}, {counted(elements, 'element')}>"


#: Takes the registered state and a bucket; returns a future of the averaged gradients, one tensor with as
#: many elements as the bucket's buffer.
CommHook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def group_of(state: object, bucket: GradBucket, hook: str) -> ProcessGroup:
    """Return the group ``state``, or the model's if that is None; raise UsageError for anything else."""
    if state is None:
        return bucket.group
    if (group := unwrap_group(state)) is not None:
        return group
    if backend_of(state) is not None:
        raise not_a_shoal_group(state, hook, "its state")
    raise UsageError(
        f"the state of {hook} is a ProcessGroup, or None for the group of the model; got "
        f"{type(state).__name__}.  Register it with model.register_comm_hook(None, {hook})"
    )


def checked_group(group: object, what: str) -> ProcessGroup | None:
    """Return ``group``, the argument ``what``, or raise UsageError if it is neither a group nor None."""
    if group is None:
        return None
    if (found := unwrap_group(group)) is not None:
        return found
    if backend_of(group) is not None:
        raise not_a_shoal_group(group, "a communication hook", what)
    raise UsageError(f"{what} must be a ProcessGroup or None, got {type(group).__name__}")


def checked_hook(hook: object, taker: str) -> CommHook:
    """Return ``hook``, an argument of the function ``taker``, or raise UsageError if it is not callable."""
    if callable(hook):
        return hook
    raise UsageError(
        f"{taker} takes a communication hook, a function hook(state, bucket) -> Future; got "
        f"{type(hook).__name__}"
    )


def then_apply(
    hook: CommHook, state: Any, bucket: GradBucket, fn: Callable[[torch.Tensor], torch.Tensor]
) -> Future[torch.Tensor]:
    """Call ``hook``, then ``fn`` with the averaged gradients; return a future of the result of ``fn``.

    Raises UsageError if ``hook`` does not return a future of shoal or torch; the future fails with UsageError
    if the value of that future is not a tensor.
    """
    future = hook(state, bucket)
    if not callable(getattr(future, "then", None)):
        raise UsageError(
            f"the communication hook {name_of(hook)} must return a Future of a tensor, got "
            f"{type(future).__name__}"
        )
    return future.then(lambda done: fn(averaged_tensor(done.value(), hook)))


def averaged_tensor(value: object, hook: CommHook) -> torch.Tensor:
    """Return the tensor in ``value``, the result of ``hook``, or raise UsageError if there is none."""
    value = unwrap_single(value)
    if isinstance(value, torch.Tensor):
        return value
    raise UsageError(
        f"the future of the communication hook {name_of(hook)} must have a tensor as its value, got "
        f"{type(value).__name__}"
    )


def store_average(bucket: GradBucket, value: torch.Tensor) -> None:
    """Replace the gradients of ``bucket`` by ``value``, which often is its buffer already."""
    buffer = bucket.buffer()
    if value.data_ptr() != buffer.data_ptr() or value.dtype != buffer.dtype:
        bucket.set_buffer(value)


def wait_for(future: Any) -> Any:
    """Wait for a future, also of torch, or a reduction; return its value.  On a device only streams wait."""
    return future.wait(blocking=False) if isinstance(future, Future) else future.wait()


def unwrap_single(value: object) -> object:
    """Unpack the list of one element that is the value of torch's futures of collectives."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def name_of(hook: object) -> str:
    """Return the name of ``hook`` for error messages."""
    return str(getattr(hook, "__qualname__", None) or repr(hook))


def check_hook(hook: object) -> None:
    """Raise UsageError unless ``hook`` can be called as ``hook(state, bucket)``."""
    expected = "a communication hook is a function hook(state, bucket) that returns a shoal.Future"
    if not callable(hook):
        raise UsageError(f"{expected}, got {_kind(hook)}")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return  # a C function without a signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise UsageError(f"{expected}, but {hook!r} takes {signature}") from error


class HookedReduction:
    """The reduction of a bucket by a hook; raises UsageError if the hook does not return a future."""

    def __init__(self, hook: CommHook, state: Any, bucket: GradBucket) -> None:
        self._name = name_of(hook)
        self._bucket = bucket
        self._future: Any = hook(state, bucket)
        if not callable(getattr(self._future, "wait", None)):
            raise UsageError(
                f"{self._where()} returned {_kind(self._future)}, but must return a shoal.Future of the "
                "averaged gradients: return what group.all_reduce(...) or its then(...) returned"
            )

    def wait(self) -> None:
        """Wait for the hook's result and copy it into the bucket; on a device, only the streams wait.

        Raises UsageError unless the result is a tensor with as many elements as the bucket.
        """
        value = unwrap_single(wait_for(self._future))
        buffer = self._bucket.buffer()
        if not isinstance(value, torch.Tensor) or value.numel() != buffer.numel():
            raise UsageError(
                f"the future of {self._where()} has the value {_kind(value)}, but must have a tensor of "
                f"{counted(buffer.numel(), 'element')}, as many as the bucket"
            )
        store_average(self._bucket, value)

    def _where(self) -> str:
        return (
            f"the communication hook {self._name} on rank {self._bucket.group.rank}, "
            f"for bucket {self._bucket.index()},"
        )


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {counted(value.numel(), 'element')}"
    return f"{type(value).__name__}: {value!r}"
