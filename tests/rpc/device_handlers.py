"""What the workers call that have the pretended device: functions, and objects that hold its tensors."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import torch

from shoal import Future
from shoal.rpc import async_execution
from tests.support import pretend_device
from tests.support.fake_streams import FakeStream
from tests.support.pretend_device import PretendRuntime, is_pretend

#: of the device, once it is made
runtime: PretendRuntime
#: what handlers leave for the scenes
noted: list[Any] = []


def make_device() -> PretendRuntime:
    """Give this process the device."""
    global runtime
    runtime = pretend_device.make()
    return runtime


def on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(pretend_device.DEVICE)


def current_stream() -> FakeStream:
    return runtime.current_stream(pretend_device.DEVICE)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def kinds(*xs: torch.Tensor) -> list[str]:
    return [x.device.type for x in xs]


def echo(x: Any) -> Any:
    return x


def note(what: Any) -> Any:
    noted.append(what)
    return what


def note_sum(x: torch.Tensor) -> None:
    noted.append(float(x.sum().item()))


def stream_name(x: torch.Tensor) -> str:
    return current_stream().name


def make_on_device() -> torch.Tensor:
    return on_device(1, 2)


def hold_own_stream(x: torch.Tensor) -> None:
    stream = current_stream()
    stream.hold()
    noted.append(stream)
    x.add_(1)


async def doubled_soon(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    before = current_stream()
    y = x * 2
    await asyncio.sleep(0.001)
    return y + 0, current_stream() is before


def fail_with(x: torch.Tensor) -> None:
    raise ValueError("with a tensor", x)


class Table:
    """An object with a tensor on the device."""

    def __init__(self) -> None:
        self.x = torch.zeros(2).to(pretend_device.DEVICE)
        self.order: list[Any] = []

    def push(self, x: Any) -> None:
        self.order.append("tensor" if is_pretend(x) else x)
        if is_pretend(x):
            self.x += x

    def push_and_hold(self, x: torch.Tensor) -> None:
        hold_own_stream(x)
        self.x += x

    def pull(self) -> torch.Tensor:
        return self.x

    def orders(self) -> list[Any]:
        return self.order


class SlowTable(Table):
    """One whose making takes the device long."""

    def __init__(self) -> None:
        stream = current_stream()
        stream.hold()
        noted.append(stream)
        super().__init__()


async def slow_table_soon() -> SlowTable:
    await asyncio.sleep(0)
    return SlowTable()


@async_execution
def slow_table_later() -> Future[SlowTable]:
    future: Future[SlowTable] = Future()
    threading.Thread(target=future.set_result, args=(SlowTable(),)).start()
    return future
