"""Operations on picklable Python objects.

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

from ..common.arguments import explain_unknown_keywords
from ..common.formatting import text_of
from ..common.tensor_bytes import TensorBytes
from ..errors import UsageError
from ..future import Future
from ..spec import ANY_SOURCE
from .collectives import Collectives
from .point_to_point import PointToPoint
from .submission import called


class Objects(Collectives, PointToPoint):
    """The operations of a group on Python objects."""

    @explain_unknown_keywords(called)
    def all_gather_object(self, obj: Any, *, timeout: float | None = None) -> Future[list[Any]]:
        """Gather picklable objects of all ranks on all ranks; the future's value is their list."""
        left = self._countdown(timeout)
        payload = self._pickled(obj)
        sizes = self._exchange_sizes(payload, timeout)

        def exchange(done: Future[torch.Tensor]) -> list[Any]:
            parts = [payload.new_empty(size) for size in done.value().tolist()]
            return [_unpickled(part) for part in self.all_gather(payload, parts, timeout=left()).wait()]

        return sizes.then(exchange)

    @explain_unknown_keywords(called)
    def gather_object(
        self, obj: Any, root: int = 0, *, dst: int | None = None, timeout: float | None = None
    ) -> Future[list[Any] | None]:
        """Gather picklable objects of all ranks on rank ``root``; the value is None on other ranks."""
        root = self._call("gather_object").named_root(root, "dst", dst)
        left = self._countdown(timeout)
        payload = self._pickled(obj)
        sizes = self._exchange_sizes(payload, timeout)

        def exchange(done: Future[torch.Tensor]) -> list[Any] | None:
            counts = done.value().tolist()
            parts = self.gather(payload, root=root, sizes=counts, timeout=left()).wait()
            return None if parts is None else [_unpickled(part) for part in parts]

        return sizes.then(exchange)

    @explain_unknown_keywords(called)
    def broadcast_object(
        self, obj: Any = None, root: int = 0, *, src: int | None = None, timeout: float | None = None
    ) -> Future[Any]:
        """Broadcast a picklable object of rank ``root``; there the future's value is ``obj``, not a copy."""
        root = self._call("broadcast_object").named_root(root, "src", src)
        left = self._countdown(timeout)
        is_root = self._rank == root
        payload = self._pickled(obj) if is_root else None
        size = self._counts([0 if payload is None else payload.numel()])

        def exchange(done: Future[torch.Tensor]) -> Any:
            content = self._bytes(int(done.value().item())) if payload is None else payload
            self.broadcast(content, root, timeout=left()).wait()
            return obj if is_root else _unpickled(content)

        return self.broadcast(size, root, timeout=timeout).then(exchange)

    @explain_unknown_keywords(called)
    def scatter_object(
        self,
        objs: Sequence[Any] | None = None,
        root: int = 0,
        *,
        src: int | None = None,
        timeout: float | None = None,
    ) -> Future[Any]:
        """Send ``objs[r]`` of rank ``root`` to rank *r*; ``objs`` is None on other ranks.

        The root gets its own object, not a copy.
        """
        call = self._call("scatter_object")
        root = call.named_root(root, "src", src)
        left = self._countdown(timeout)
        parts = None
        if self._rank == root:
            if objs is None or len(objs) != self._size:
                given = "None" if objs is None else f"{len(objs)}"
                call.refuse(f"root must pass one object per rank, {self._size}, got {given}")
            parts = [self._pickled(obj) for obj in objs]
        elif objs is not None:
            call.refuse(f"only root, rank {root}, passes objects")
        sizes = self._counts([part.numel() for part in parts] if parts else [0] * self._size)

        def exchange(done: Future[torch.Tensor]) -> Any:
            counts = done.value().tolist()
            own = self._bytes(counts[self._rank])
            self.scatter(own, parts, root, sizes=counts, timeout=left()).wait()
            return _unpickled(own) if objs is None else objs[root]

        return self.broadcast(sizes, root, timeout=timeout).then(exchange)

    @explain_unknown_keywords(called)
    def send_object(self, obj: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> Future[None]:
        """Send a picklable object to rank ``dst``, which calls :meth:`recv_object`."""
        # One message, as its header contains the length.
        return self.send(self._pickled(obj), dst, tag, timeout=timeout)

    @explain_unknown_keywords(called)
    def recv_object(
        self, src: int = ANY_SOURCE, tag: int = 0, *, timeout: float | None = None
    ) -> Future[Any]:
        """Receive an object sent by :meth:`send_object`."""
        content = self.recv(None, src, tag, timeout=timeout)
        return content.then(lambda done: received(done.value(), self._rank))

    def _exchange_sizes(self, payload: torch.Tensor, timeout: float | None) -> Future[torch.Tensor]:
        own = self._counts([payload.numel()])
        return self.all_gather_single(own.new_empty(self._size), own, timeout=timeout)

    def _pickled(self, obj: Any) -> torch.Tensor:
        try:
            data = bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            raise UsageError(
                f"an object of type {type(obj).__name__} on rank {self._rank} cannot be pickled, "
                f"so it cannot be sent: {text_of(error)}"
            ) from error
        return torch.frombuffer(data, dtype=torch.uint8).to(self._scratch_device)

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._scratch_device)

    def _counts(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._scratch_device)

    def _countdown(self, timeout: float | None) -> Callable[[], float]:
        """Return a function for the remaining timeout, which the second operation uses."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        return lambda: max(deadline - time.monotonic(), 1e-3)


def received(content: torch.Tensor, rank: int) -> Any:
    """Return the object in a message that :meth:`Objects.send_object` sent to ``rank``.

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
