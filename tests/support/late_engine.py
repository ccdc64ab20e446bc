"""An engine for the pretended device that writes results by itself, and whose futures are done after that.

It waits for the caller's stream, and lets the relay move the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from shoal_relay import RelayEngine

from shoal.backend.engine import Communicator, Engine, Setup, Transfer
from shoal.backend.registry import register_backend
from shoal.backend.supervised import SupervisedBackend
from shoal.rendezvous import Membership
from shoal.spec import Operation

from .pretend_device import PretendRuntime, memory_of


class LateEngine(Engine):
    name = "late"
    device = "pretend"
    runtime: ClassVar[PretendRuntime]

    def __init__(self, membership: Membership) -> None:
        self._relay = RelayEngine(membership)

    def communicator(self, setup: Setup) -> Communicator:
        return _LateCommunicator(self._relay.communicator(setup), self.runtime, setup.device)


class LateBackend(SupervisedBackend):
    name = "late"
    engine_type = LateEngine


class _LateCommunicator(Communicator):
    def __init__(self, relay: Communicator, runtime: PretendRuntime, device: torch.device) -> None:
        self.relay, self.runtime, self._device = relay, runtime, device

    def start(self, operation: Operation) -> Transfer:
        return _LateTransfer(self, self.runtime.record(self.runtime.current_stream(self._device)), operation)

    def close(self) -> None:
        self.relay.close()


class _LateTransfer(Transfer):
    """Begins when the inputs are computed; transfers are polled in the same order on all ranks."""

    def __init__(self, communicator: _LateCommunicator, ready: Any, operation: Operation) -> None:
        self._communicator, self._ready, self._operation = communicator, ready, operation
        self._moving: Transfer | None = None

    def poll(self) -> bool:
        if self._moving is None:
            if not self._communicator.runtime.query(self._ready):
                return False
            operation = self._operation
            memory = replace(operation, inputs=_memory(operation.inputs), outputs=_memory(operation.outputs))
            self._moving = self._communicator.relay.start(memory)
        return self._moving.poll()


def _memory(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [memory_of(x) for x in tensors]


def use_late_engine(runtime: PretendRuntime) -> None:
    """Register the engine as the backend "late", once in a process."""
    LateEngine.runtime = runtime
    register_backend("late", LateBackend)
