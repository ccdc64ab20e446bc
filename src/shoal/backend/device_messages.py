"""Messages of tensors on devices, carried through host memory by a channel of the CPU.

So tags, any source and unknown shapes work as on the CPU.  A send blocks until the tensor has been copied to
the host; a receive copies on a stream when the message has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..future import Future
from ..spec import Operation, OpKind
from ..streams import DeviceEvents, completion_events, runtime_of
from .base import DataChannel


def submit_device_message(channel: DataChannel, operation: Operation) -> Future[Any]:
    """Submit a SEND or RECV, whose tensor is on a device, to ``channel``, as ``DataChannel.submit`` would."""
    if operation.kind is OpKind.SEND:
        return channel.submit(replace(operation, inputs=[operation.inputs[0].detach().cpu()]))
    return _DeviceReceive(channel, operation).future()


class _DeviceReceive:
    """The source of the future of a receive: complete when the message is in host memory."""

    def __init__(self, channel: DataChannel, operation: Operation) -> None:
        y = operation.outputs[0]
        self._target = y
        self._host = runtime_of(y.device).host_memory(y.nbytes).view(y.dtype).view(y.shape)
        #: Work of the caller that may still use the output.
        self._caller_events = completion_events(operation.outputs, None, None)
        self._inner = channel.submit(replace(operation, outputs=[self._host]))

    def future(self) -> Future[Any]:
        return Future(self, finish=self._finish, keep=self._target)

    def _finish(self) -> tuple[torch.Tensor, int, int]:
        _, source, tag = self._inner.value()
        with torch.no_grad():
            self._target.copy_(self._host, non_blocking=True)
        return self._target, source, tag

    # -- the source ------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        return self._inner.done() or self._inner._complete(timeout)

    def done(self) -> bool:
        return self._inner.done()

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def events(self) -> tuple[DeviceEvents | None, object]:
        return self._caller_events, self._target

    def notify(self, fn: Callable[[], None]) -> None:
        self._inner._subscribe(lambda _: fn())
