"""Torch's ``_coalesced`` operations: one operation on several tensors, with one future."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import UsageError, WaitTimeout
from ..future import Future, FutureSource, collect_all, derive_key
from ..group import ProcessGroup
from ..spec import ReduceOp
from ..streams import DeviceEvents
from .aliased_outputs import with_distinct_outputs


def all_reduce(
    group: ProcessGroup, tensors: Sequence[torch.Tensor], op: ReduceOp, timeout: float | None = None
) -> Future[Any]:
    """All-reduce several tensors, each in place.  A tensor that is listed twice is reduced once."""
    return with_distinct_outputs(
        tensors,
        lambda each: combine_futures(group.all_reduce(x, op, timeout=timeout) for x in each),
        keep=True,
    )


def all_gather(
    group: ProcessGroup,
    operation: str,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    timeout: float | None = None,
) -> Future[Any]:
    """Gather ``inputs[i]`` of rank *r* into ``outputs[r][i]`` on all ranks.

    Args:
        operation: torch's name of the operation, for errors.

    Raises:
        UsageError: ``outputs`` is not one list per rank, each as long as ``inputs``.
    """
    count = len(inputs)
    if len(outputs) != group.size or any(len(each) != count for each in outputs):
        raise UsageError(
            f"{operation} on rank {group.rank}: expected {group.size} lists of {count} output tensors, "
            f"got lists of {[len(each) for each in outputs]}"
        )
    return all_gather_flat(group, [x for each in outputs for x in each], inputs, timeout)


def all_gather_flat(
    group: ProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    timeout: float | None = None,
) -> Future[Any]:
    """Gather ``inputs[i]`` of rank *r* into ``outputs[r * len(inputs) + i]`` on all ranks."""
    count = len(inputs)
    return with_distinct_outputs(
        outputs,
        lambda flat: combine_futures(
            group.all_gather(flat[i::count], x, timeout=timeout) for i, x in enumerate(inputs)
        ),
    )


def combine_futures(operations: Iterable[Future[Any]]) -> Future[Any]:
    """Combine several futures into one.  The waiting thread drives all operations; no helper thread."""
    futures = list(operations)
    if len(futures) == 1:
        return futures[0]
    result: Future[Any] = Future(_CombinedSource(futures))
    keys = [future.key for future in futures if future.key is not None]
    if len(keys) == len(futures):
        result.key = derive_key(b"together", *keys)
    return result


class _CombinedSource(FutureSource):
    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures = futures

    def wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        for future in self._futures:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                future.wait(left, blocking=False)
            except WaitTimeout:
                if not future.done():
                    return False
            except Exception:
                return True  # exception() returns the error
        return True

    def done(self) -> bool:
        failed = any(future.done() and future.exception() is not None for future in self._futures)
        return failed or all(future.done() for future in self._futures)

    def exception(self) -> BaseException | None:
        errors = (future.exception() for future in self._futures if future.done())
        return next((error for error in errors if error is not None), None)

    def events(self) -> tuple[DeviceEvents | None, object]:
        parts = [future._device for future in self._futures if future._device is not None]
        return DeviceEvents.merged(parts) if parts else None, [f._payload() for f in self._futures]

    def notify(self, fn: Callable[[], None]) -> None:
        collect_all(self._futures)._subscribe(lambda _: fn())
