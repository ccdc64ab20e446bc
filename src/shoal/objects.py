"""Operations on any picklable Python object.

Objects are pickled, and pickles run code when they are loaded.  They travel in the traffic of the group
alone, never through the store: every connection was authenticated with the job's secret before its
first byte was read, so they come from the job's own processes.

Each collective is two operations, the sizes first and then the bytes.  The second is issued in a callback
of the first, where operations are matched by key: neither blocks the caller, and other
operations may be submitted meanwhile, in any order that agrees across ranks.  A future must
complete before its group is closed.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import UsageError
from .future import Future

if TYPE_CHECKING:
    from .group import ProcessGroup


def all_gather_object(group: ProcessGroup, obj: Any, timeout: float | None) -> Future[list[Any]]:
    """The objects of all ranks, in the order of ranks."""
    left = _countdown(group, timeout)
    payload = _pickled(group, obj)
    sizes = _exchange_sizes(group, payload, timeout)

    def exchange(done: Future[torch.Tensor]) -> list[Any]:
        parts = [payload.new_empty(size) for size in done.value().tolist()]
        return [_unpickled(part) for part in group.all_gather(payload, parts, timeout=left()).wait()]

    return sizes.then(exchange)


def gather_object(
    group: ProcessGroup, obj: Any, root: int, timeout: float | None
) -> Future[list[Any] | None]:
    """The objects of all ranks on ``root``, None elsewhere."""
    group._call("gather_object").root(root)
    left = _countdown(group, timeout)
    payload = _pickled(group, obj)
    sizes = _exchange_sizes(group, payload, timeout)

    def exchange(done: Future[torch.Tensor]) -> list[Any] | None:
        counts = done.value().tolist()
        parts = group.gather(payload, root=root, sizes=counts, timeout=left()).wait()
        return None if parts is None else [_unpickled(part) for part in parts]

    return sizes.then(exchange)


def broadcast_object(group: ProcessGroup, obj: Any, root: int, timeout: float | None) -> Future[Any]:
    """The object of ``root``, which gets its own back as it is."""
    group._call("broadcast_object").root(root)
    left = _countdown(group, timeout)
    is_root = group.rank == root
    payload = _pickled(group, obj) if is_root else None
    size = _counts(group, [0 if payload is None else payload.numel()])

    def exchange(done: Future[torch.Tensor]) -> Any:
        content = _bytes(group, int(done.value().item())) if payload is None else payload
        group.broadcast(content, root, timeout=left()).wait()
        return obj if is_root else _unpickled(content)

    return group.broadcast(size, root, timeout=timeout).then(exchange)


def scatter_object(
    group: ProcessGroup, objs: Sequence[Any] | None, root: int, timeout: float | None
) -> Future[Any]:
    """``objs[rank]`` of ``root``, which gets its own back as it is."""
    call = group._call("scatter_object")
    call.root(root)
    left = _countdown(group, timeout)
    parts = None
    if group.rank == root:
        if objs is None or len(objs) != group.size:
            given = "None" if objs is None else f"{len(objs)}"
            call.refuse(f"root must pass one object per rank, {group.size}, got {given}")
        parts = [_pickled(group, obj) for obj in objs]
    elif objs is not None:
        call.refuse(f"only root, rank {root}, passes objects")
    sizes = _counts(group, [part.numel() for part in parts] if parts else [0] * group.size)

    def exchange(done: Future[torch.Tensor]) -> Any:
        counts = done.value().tolist()
        own = _bytes(group, counts[group.rank])
        group.scatter(own, parts, root, sizes=counts, timeout=left()).wait()
        return _unpickled(own) if objs is None else objs[root]

    return group.broadcast(sizes, root, timeout=timeout).then(exchange)


def send_object(group: ProcessGroup, obj: Any, dst: int, tag: int, timeout: float | None) -> Future[None]:
    """One message: its header says how long it is."""
    return group.send(_pickled(group, obj), dst, tag, timeout=timeout)


def recv_object(group: ProcessGroup, src: int, tag: int, timeout: float | None) -> Future[Any]:
    """The object that :func:`send_object` sent."""

    return group.recv(None, src, tag, timeout=timeout).then(lambda done: received(group, done.value()))


def received(group: ProcessGroup, content: torch.Tensor) -> Any:
    """The object in a message that :func:`send_object` sent."""
    if content.dtype is not torch.uint8 or content.dim() != 1:
        raise UsageError(
            f"recv_object on rank {group.rank}: a tensor of {content.dtype} and shape "
            f"{tuple(content.shape)} arrived, not an object; use send_object with recv_object"
        )
    return _unpickled(content)


def _exchange_sizes(
    group: ProcessGroup, payload: torch.Tensor, timeout: float | None
) -> Future[torch.Tensor]:
    own = _counts(group, [payload.numel()])
    return group.all_gather_single(own.new_empty(group.size), own, timeout=timeout)


def _pickled(group: ProcessGroup, obj: Any) -> torch.Tensor:
    try:
        data = bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"an object of type {type(obj).__name__} on rank {group.rank} cannot be pickled, "
            f"so it cannot be sent: {error}"
        ) from error
    return torch.frombuffer(data, dtype=torch.uint8).to(group._scratch_device)


def _unpickled(content: torch.Tensor) -> Any:
    return pickle.loads(content.cpu().numpy().data)


def _bytes(group: ProcessGroup, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=group._scratch_device)


def _counts(group: ProcessGroup, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=group._scratch_device)


def _countdown(group: ProcessGroup, timeout: float | None) -> Callable[[], float]:
    """What is left of the timeout, for the second operation: it counts from the call."""
    deadline = time.monotonic() + (group.timeout if timeout is None else timeout)
    return lambda: max(deadline - time.monotonic(), 1e-3)
