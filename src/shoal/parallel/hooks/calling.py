"""Calling a communication hook, and copying its result into the bucket."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...common.wording import counted
from ...errors import UsageError
from .bucket import CommHook, GradBucket
from .contract import name_of, unpacked, waited


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

    def wait(self, *, blocking: bool = True) -> None:
        """Wait for the hook's result and copy it into the bucket; ``blocking`` as for ``Future.wait``.

        Raises UsageError unless the result is a tensor with as many elements as the bucket.
        """
        value = unpacked(waited(self._future, blocking=blocking))
        buffer = self._bucket.buffer()
        if not isinstance(value, torch.Tensor) or value.numel() != buffer.numel():
            raise UsageError(
                f"the future of {self._where()} has the value {_kind(value)}, but must have a tensor of "
                f"{counted(buffer.numel(), 'element')}, as many as the bucket"
            )
        if value.data_ptr() != buffer.data_ptr() or value.dtype != buffer.dtype:
            with torch.no_grad():
                self._bucket.set_buffer(value)

    def _where(self) -> str:
        return (
            f"the communication hook {self._name} on rank {self._bucket.group.rank}, "
            f"for bucket {self._bucket.index()},"
        )


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {counted(value.numel(), 'element')}"
    return f"{type(value).__name__}: {value!r}"
