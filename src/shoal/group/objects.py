"""The operations of a group on picklable Python objects, made of its operations on tensors.

Loading a pickle can run code.  Pickles are sent over the group's connections only, never through the store:
every connection is authenticated with the job's secret, so they come from processes of the job.

Each collective consists of two operations: sizes, then bytes.  The second is issued in a callback of the
first, where operations are matched by key.  So neither blocks the caller, and other operations may be
submitted meanwhile in the same order on all ranks.  Futures must complete before the group is closed.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..common.formatting import text_of
from ..common.tensor_bytes import TensorBytes
from ..errors import UsageError
from ..future import Future
from .operations import TensorOperations


def all_gather(group: TensorOperations, obj: Any, timeout: float | None) -> Future[list[Any]]:
    remaining = _countdown(group, timeout)
    payload = _pickled(group, obj)
    sizes = _exchange_sizes(group, payload, timeout)

    def exchange(done: Future[torch.Tensor]) -> list[Any]:
        parts = [payload.new_empty(size) for size in done.value().tolist()]
        return [_unpickled(part) for part in group.all_gather(parts, payload, timeout=remaining()).wait()]

    return sizes.then(exchange)


def gather(
    group: TensorOperations, obj: Any, root: int, dst: int | None, timeout: float | None
) -> Future[list[Any] | None]:
    root = group._call("gather_object").named_root(root, "dst", dst)
    remaining = _countdown(group, timeout)
    payload = _pickled(group, obj)
    sizes = _exchange_sizes(group, payload, timeout)

    def exchange(done: Future[torch.Tensor]) -> list[Any] | None:
        counts = done.value().tolist()
        parts = group.gather(payload, root=root, sizes=counts, timeout=remaining()).wait()
        return None if parts is None else [_unpickled(part) for part in parts]

    return sizes.then(exchange)


def broadcast(
    group: TensorOperations, obj: Any, root: int, src: int | None, timeout: float | None
) -> Future[Any]:
    root = group._call("broadcast_object").named_root(root, "src", src)
    remaining = _countdown(group, timeout)
    is_root = group._rank == root
    payload = _pickled(group, obj) if is_root else None
    size = _counts(group, [0 if payload is None else payload.numel()])

    def exchange(done: Future[torch.Tensor]) -> Any:
        content = _bytes(group, int(done.value().item())) if payload is None else payload
        group.broadcast(content, root, timeout=remaining()).wait()
        return obj if is_root else _unpickled(content)

    return group.broadcast(size, root, timeout=timeout).then(exchange)


def scatter(
    group: TensorOperations, objs: Sequence[Any] | None, root: int, src: int | None, timeout: float | None
) -> Future[Any]:
    call = group._call("scatter_object")
    root = call.named_root(root, "src", src)
    remaining = _countdown(group, timeout)
    parts = None
    if group._rank == root:
        if objs is None or len(objs) != group._size:
            given = "None" if objs is None else f"{len(objs)}"
            call.refuse(f"root must pass one object per rank, {group._size}, got {given}")
        parts = [_pickled(group, obj) for obj in objs]
    elif objs is not None:
        call.refuse(f"only root, rank {root}, passes objects")
    sizes = _counts(group, [part.numel() for part in parts] if parts else [0] * group._size)

    def exchange(done: Future[torch.Tensor]) -> Any:
        counts = done.value().tolist()
        own = _bytes(group, counts[group._rank])
        group.scatter(own, parts, root, sizes=counts, timeout=remaining()).wait()
        return _unpickled(own) if objs is None else objs[root]

    return group.broadcast(sizes, root, timeout=timeout).then(exchange)


def send(group: TensorOperations, obj: Any, dst: int, tag: int, timeout: float | None) -> Future[None]:
    # One message, as its header contains the length.
    return group.send(_pickled(group, obj), dst, tag, timeout=timeout)


def recv(group: TensorOperations, src: int, tag: int, timeout: float | None) -> Future[Any]:
    content = group.recv(None, src, tag, timeout=timeout)
    return content.then(lambda done: received(done.value(), group._rank))


def _exchange_sizes(
    group: TensorOperations, payload: torch.Tensor, timeout: float | None
) -> Future[torch.Tensor]:
    own = _counts(group, [payload.numel()])
    return group.all_gather_single(own.new_empty(group._size), own, timeout=timeout)


def _pickled(group: TensorOperations, obj: Any) -> torch.Tensor:
    try:
        data = bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(
            f"an object of type {type(obj).__name__} on rank {group._rank} cannot be pickled, "
            f"so it cannot be sent: {text_of(error)}"
        ) from error
    return torch.frombuffer(data, dtype=torch.uint8).to(group._scratch_device)


def _bytes(group: TensorOperations, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=group._scratch_device)


def _counts(group: TensorOperations, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=group._scratch_device)


def _countdown(group: TensorOperations, timeout: float | None) -> Callable[[], float]:
    """Return a function for the remaining timeout, which the second operation uses."""
    deadline = time.monotonic() + (group._timeout if timeout is None else timeout)
    return lambda: max(deadline - time.monotonic(), 1e-3)


def received(content: torch.Tensor, rank: int) -> Any:
    """Return the object in a message that :func:`send` sent to ``rank``.

    Raises:
        UsageError: the message is an ordinary tensor.
    """
    if content.dtype is not torch.uint8 or content.dim() != 1:
        raise UsageError(
            f"recv_object on rank {rank}: a tensor of {content.dtype} and shape "
            f"{tuple(content.shape)} arrived, not an object; use send_object with recv_object"
        )
    return _unpickled(content)


def _unpickled(content: torch.Tensor) -> Any:
    with TensorBytes(content) as view:
        return pickle.loads(view)
