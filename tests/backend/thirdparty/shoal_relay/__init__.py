"""An example of an engine for shoal: it relays the data of collectives through the job's key-value store.

    group = shoal.init(backend="relay")

An engine for a fast network differs in the two methods of :class:`RelayCommunicator` that start and poll.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.backend.base import GroupSpec
from shoal.backend.engine import Communicator, Engine, Setup, Transfer
from shoal.backend.kernels import reduction_kernel
from shoal.backend.supervised import SupervisedBackend
from shoal.rendezvous import Membership
from shoal.spec import REDUCING, Operation, OpKind
from shoal.store import PrefixStore, Store

_TIMEOUT_S = 30.0
#: operations whose inputs have a part for each rank
_SCATTERING = (OpKind.SCATTER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL)
_FROM_ROOT = (OpKind.BROADCAST, OpKind.SCATTER)
_TO_ROOT = (OpKind.REDUCE, OpKind.GATHER)


class RelayEngine(Engine):
    """The engine of one process.  The ranks need no addresses, because all of them have the store."""

    name = "relay"

    def __init__(self, membership: Membership) -> None:
        self._store = membership.store

    def communicator(self, setup: Setup) -> RelayCommunicator:
        spec = setup.spec
        return RelayCommunicator(PrefixStore(f"relay/{spec.ident:x}/", self._store), spec)


class RelayBackend(SupervisedBackend):
    """The backend "relay"."""

    name = "relay"
    engine_type = RelayEngine


class RelayCommunicator(Communicator):
    """Moves the data of one group.  The parts of operation *n* have the keys ``n/source/part``."""

    def __init__(self, store: Store, spec: GroupSpec) -> None:
        self.store, self.rank, self.size = store, spec.rank, len(spec.ranks)
        self._count = 0

    def start(self, operation: Operation) -> RelayTransfer:
        # All ranks start the same operations in the same order, so a counter identifies them.
        number, self._count = self._count, self._count + 1
        for part, x in enumerate(self._outgoing(operation)):
            raw = x.detach().reshape(-1).view(torch.uint8)
            self.store.set(f"{number}/{self.rank}/{part}", raw.numpy().tobytes())
        return RelayTransfer(self, number, operation)

    def _outgoing(self, operation: Operation) -> Sequence[torch.Tensor]:
        inputs = operation.inputs
        if operation.kind in _SCATTERING and len(inputs) == 1:  # one tensor with all parts
            return inputs[0].detach().reshape(-1).tensor_split(self.size)
        return inputs

    def close(self) -> None:
        """Do nothing: the last reader of an operation has deleted its keys."""


class RelayTransfer(Transfer):
    """One operation on this rank: waits for the parts that it needs, and then writes the outputs."""

    def __init__(self, communicator: RelayCommunicator, number: int, operation: Operation) -> None:
        self._communicator, self._number, self._operation = communicator, number, operation
        kind, size = operation.kind, communicator.size
        sources: Sequence[int] = range(size)
        if kind in _FROM_ROOT:
            sources = [operation.root]
        elif kind in _TO_ROOT and communicator.rank != operation.root:
            sources = []
        part = communicator.rank if kind in _SCATTERING else 0
        self._keys = [f"{number}/{source}/{part}" for source in sources]

    def poll(self) -> bool:
        if self._keys:
            if not self._communicator.store.check(self._keys):
                return False
            self._write(self._communicator.store.multi_get(self._keys, _TIMEOUT_S))
        self._delete_if_last()
        return True

    def _write(self, values: Sequence[bytes]) -> None:
        operation = self._operation
        outputs = operation.outputs
        if operation.kind in REDUCING:
            target = outputs[0]
            inputs = [bytearray(value) for value in values]
            addresses = [torch.frombuffer(raw, dtype=torch.uint8).data_ptr() for raw in inputs if raw]
            if addresses:
                reduce = reduction_kernel(target.dtype, operation.op, self._communicator.size)
                reduce([target.data_ptr()], addresses, target.numel())
        elif len(outputs) == 1:  # one tensor for all parts
            _fill(outputs[0], b"".join(values))
        else:
            for output, value in zip(outputs, values, strict=True):
                _fill(output, value)

    def _delete_if_last(self) -> None:
        store, number, size = self._communicator.store, self._number, self._communicator.size
        if store.add(f"{number}/read", 1) == size:
            parts = size if self._operation.kind in _SCATTERING else 1
            for source in range(size):
                for part in range(parts):
                    store.delete(f"{number}/{source}/{part}")
            store.delete(f"{number}/read")


def _fill(x: torch.Tensor, value: bytes) -> None:
    with torch.inference_mode():  # also for tensors that require gradients
        if value:
            x.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
