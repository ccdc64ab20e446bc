"""An engine for the pretended device: complete when enqueued, its bytes carried by the mailbox backend.

    runtime = pretend_device.make()
    use_device_engine(runtime)
    run_threads(train, 2, backend="device")

Each channel has a stream, on which its numbered operations run; one of a callback has its own.  Tensors of
the CPU go to the mailbox as they are.  What goes wrong on a stream is the failure of its events.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from shoal_mailbox import MailboxBackend

from shoal.backend.base import DataChannel, GroupSpec, Membership
from shoal.backend.registry import register_backend
from shoal.errors import GroupError
from shoal.future import Future
from shoal.spec import Operation, OpKind
from shoal.streams import DeviceEvents

from . import pretend_device
from .fake_streams import FakeStream
from .pretend_device import PretendRuntime, is_pretend, memory_of

_runtime: PretendRuntime


class DeviceEngine(MailboxBackend):
    """Gives each group a :class:`DeviceChannel`."""

    name = "device"

    def __init__(self, membership: Membership, *, timeout: float) -> None:
        super().__init__(membership, timeout=timeout)
        self._rank = membership.rank

    def channel(self, group: GroupSpec) -> DataChannel:
        return DeviceChannel(super().channel(group), f"engine {group.name} {group.ident} {self._rank}")


class DeviceChannel(DataChannel):
    """See the module."""

    devices = frozenset({"cpu", "pretend"})

    def __init__(self, mailbox: DataChannel, name: str) -> None:
        self._mailbox = mailbox
        self._name = name
        self._stream = _runtime.stream(pretend_device.DEVICE, name)
        self._keyed: list[FakeStream] = []

    def submit(self, operation: Operation) -> Future[Any]:
        if not any(is_pretend(x) for x in (*operation.inputs, *operation.outputs)):
            return self._mailbox.submit(operation)
        device = pretend_device.DEVICE
        stream = self._stream
        if operation.key:
            stream = _runtime.stream(device, f"{self._name} keyed")
            self._keyed.append(stream)
        stream.wait_event(_runtime.record(_runtime.current_stream(device)))
        there = replace(operation, inputs=_memory(operation.inputs), outputs=_memory(operation.outputs))
        _runtime.launch(stream, lambda: self._mailbox.submit(there).wait())
        events = DeviceEvents()
        events.record({device: stream})
        future: Future[Any] = Future(device=events, keep=operation.inputs)
        outputs = list(operation.outputs)
        if operation.kind is OpKind.RECV:  # from a known source, since the message has not arrived yet
            future.set_result((outputs[0], operation.peer, operation.tag))
        else:
            future.set_result(None if not outputs else outputs[0] if len(outputs) == 1 else outputs)
        return future

    def failure(self) -> GroupError | None:
        return self._mailbox.failure()

    def abort(self, reason: str) -> None:
        self._mailbox.abort(reason)

    def close(self, timeout: float) -> None:
        """Close the mailbox when the streams have come to their ends, or broken."""
        deadline = time.monotonic() + timeout
        for event in [stream.record() for stream in (self._stream, *self._keyed)]:
            with contextlib.suppress(Exception):
                event.wait(max(0.0, deadline - time.monotonic()))
        self._mailbox.close(max(0.0, deadline - time.monotonic()))


def _memory(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [memory_of(x) if is_pretend(x) else x for x in tensors]


def use_device_engine(runtime: PretendRuntime) -> None:
    """Register the engine as the backend "device", once in a process."""
    global _runtime
    _runtime = runtime
    register_backend("device", DeviceEngine)
