"""Functions that workers call at one another."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import torch

from shoal import Future
from shoal.rpc import async_execution, current
from tests.support.waiting import until

#: what handlers leave for one another in a process
noted: dict[str, Any] = {}
#: seconds after which a handler that waits for something gives up
PATIENCE = 20.0


def echo(*args: Any, **kwargs: Any) -> Any:
    return (args, kwargs) if kwargs else args[0] if len(args) == 1 else args


def pid() -> int:
    return os.getpid()


def note(key: str, value: Any = True) -> None:
    noted[key] = value


def recall(key: str) -> Any:
    return noted.get(key)


def caller() -> str:
    return current().caller


def nap(seconds: float) -> int:
    """Take a while, as work would."""
    time.sleep(seconds)
    return 1


def wait_for(key: str) -> Any:
    """Wait until something was noted."""
    until(lambda: key in noted, lambda: f"nobody noted {key}")
    return noted[key]


def blocked(key: str) -> Any:
    """Note that this runs, and wait until something was noted."""
    note(f"{key} runs")
    return wait_for(key)


def until_cancelled(key: str) -> None:
    """Note that this runs, and again when nobody wants the result any more."""
    note(f"{key} runs")
    until(current().cancelled)
    note(f"{key} ended")


async def until_cancelled_async(key: str) -> None:
    note(f"{key} runs")
    try:
        await asyncio.sleep(PATIENCE)
    except asyncio.CancelledError:
        note(f"{key} ended")
        raise


async def async_double(x: Any) -> Any:
    await asyncio.sleep(0)
    assert current().caller
    return 2 * x


@async_execution
def later(x: Any) -> Future[Any]:
    future: Future[Any] = Future()
    threading.Timer(0.01, future.set_result, [x]).start()
    return future


@async_execution
def no_future() -> int:
    return 1


def countdown(n: int, first: str, second: str) -> int:
    """Call back and forth, ``n`` calls deep."""
    if n == 0:
        return 0
    return 1 + current().agent.peer(first).call(countdown, n - 1, second, first).wait(PATIENCE)


def seconds_left() -> float | None:
    return current().remaining()


class Odd(Exception):
    """Its arguments are not what it is made of."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"odd: {first + second}")


class Holding(Exception):
    """It cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holding a lock")
        self.lock = threading.Lock()


class NotFound(KeyError):
    code = 0


def fail(kind: str) -> None:
    if kind == "odd":
        raise Odd(1, 2)
    if kind == "holding":
        raise Holding
    if kind == "own":
        error = NotFound("key")
        error.code = 404
        raise error
    raise ValueError("no such thing", 7)


def lock() -> Any:
    return threading.Lock()


def graph() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


def total(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(xs).sum(0)


def grow_first(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    xs[0] += 1
    return xs


def fail_unencodably(kind: str) -> None:
    """Raise what is hard to tell to others."""
    if kind == "half a character":
        raise ValueError("caf\udce9")
    raise SyntaxError("flawed", ("file", "no number", -1, 7))


class Failing:
    """An actor that raises it."""

    def fail(self, kind: str) -> None:
        fail_unencodably(kind)

    def live(self) -> str:
        return "alive"


class Refusing:
    """Cannot be pickled, for a reason of its own."""

    def __reduce__(self) -> str:
        raise ValueError("it will not go")


class Interrupted(BaseException):
    """No Exception."""


def interrupt() -> None:
    raise Interrupted("just now")
