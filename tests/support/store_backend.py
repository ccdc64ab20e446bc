"""The smallest backend that works between threads and processes alike: tensors travel through the store."""

from __future__ import annotations

import io
from typing import Any

import torch

from shoal import Backend, DataChannel, Future, GroupAborted, GroupSpec, Membership, Operation, OpKind, Store
from shoal.backend.registry import register_backend
from shoal.errors import GroupError


class StoreBackend(Backend):
    """all_reduce (sum), all_gather and barrier, each finished before ``submit`` returns."""

    name = "store"

    def __init__(self, membership: Membership, *, timeout: float, color: str = "red") -> None:
        self.membership = membership
        self.closed = False

    def channel(self, group: GroupSpec) -> StoreChannel:
        return StoreChannel(group, self.membership.store)

    def close(self, timeout: float) -> None:
        self.closed = True


class StoreChannel(DataChannel):
    def __init__(self, spec: GroupSpec, store: Store) -> None:
        self.spec = spec
        self.store = store
        self.broken: GroupError | None = None

    def submit(self, operation: Operation) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self._run(operation))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run(self, operation: Operation) -> Any:
        prefix = f"op/{self.spec.ident}/{operation.number}/{operation.key}"
        abort = f"abort/{self.spec.ident}"
        data = io.BytesIO()
        torch.save([tensor.clone() for tensor in operation.inputs], data)
        keys = [f"{prefix}/{rank}" for rank in range(len(self.spec.ranks))]
        self.store.set(keys[self.spec.rank], data.getvalue())
        for key in keys:
            while not self.store.check([key]):
                if self.store.check([abort]):
                    self.broken = GroupAborted(self.store.get(abort).decode())
                    raise self.broken
        parts = [torch.load(io.BytesIO(raw)) for raw in self.store.multi_get(keys)]
        if operation.kind is OpKind.ALL_REDUCE:
            operation.outputs[0].copy_(sum(part[0] for part in parts))
        elif operation.kind is OpKind.ALL_GATHER and len(operation.outputs) == 1:
            operation.outputs[0].copy_(
                torch.cat([part[0].flatten() for part in parts]).view_as(operation.outputs[0])
            )
        outputs = list(operation.outputs)
        return outputs[0] if len(outputs) == 1 else outputs or None

    def failure(self) -> GroupError | None:
        return self.broken

    def abort(self, reason: str) -> None:
        self.broken = GroupAborted(reason)
        self.store.set(f"abort/{self.spec.ident}", reason)

    def close(self, timeout: float) -> None:
        pass


def use_store_backend() -> None:
    """Register the backend as "store" in this process."""
    register_backend("store", StoreBackend)
