"""The GPUs of a node's process, the device where the node creates tensors, and events on the GPUs."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch

from ...common.formatting import counted
from ...errors import UsageError

_chosen = -1


@cache
def _kind() -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "node" else found.type


def count() -> int:
    return torch.accelerator.device_count() if _kind() is not None else 0


def choose(device: str) -> None:
    """Set the device where this node creates tensors, such as "cpu" or "cuda:1"; raises `UsageError`."""
    global _chosen
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise UsageError(f"{device!r} is not a device: expected cpu, or a GPU such as cuda:0") from None
    if wanted.type == "cpu":
        _chosen = -1
        return
    index = wanted.index or 0
    if wanted.type != _kind() or index >= count():
        there = f"{counted(count(), 'GPU')}, from {_kind()}:0 on" if count() else "no GPU"
        raise UsageError(f"there is no {device} here: torch sees {there}")
    _chosen = index


def chosen() -> int:
    """Return the index of the GPU where tensors are created; -1: the CPU."""
    return _chosen


def device(index: int) -> torch.device:
    """Return the GPU of this index; -1: the CPU."""
    return torch.device("cpu") if index < 0 else torch.device(_kind() or "cuda", index)


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)
    if count():
        _module().manual_seed_all(number)


def random_state() -> torch.Tensor:
    """Return the concatenated states of the random generators: the CPU, then the GPUs."""
    return torch.cat(_states())


def set_random_state(state: torch.Tensor) -> None:
    """Restore a state that :func:`random_state` returned."""
    first, *others = torch.split(state, [len(each) for each in _states()])
    torch.default_generator.set_state(first.clone())
    for index, each in enumerate(others):
        _module().set_rng_state(each.clone(), index)


def _states() -> list[torch.Tensor]:
    states = [torch.default_generator.get_state()]
    return states + [_module().get_rng_state(index) for index in range(count())]


def _module() -> Any:
    return torch.get_device_module(_kind())


class NodeEvent:
    """An event recorded in the stream of the calling thread: a time, and a CUDA event on each GPU.

    `timing`: whether :meth:`elapsed` is needed.
    """

    __slots__ = ("_at", "_events")

    def __init__(self, timing: bool) -> None:
        self._at = time.perf_counter()
        self._events: list[Any] = []
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(index))
                self._events.append(event)

    def reached(self, wait: bool) -> bool:
        """Return whether the GPUs have done everything enqueued before it; with `wait`, wait for that."""
        for event in self._events:  # the CPU has done everything before it when the event is recorded
            if wait:
                event.synchronize()
        return all(event.query() for event in self._events)

    def elapsed(self, end: NodeEvent) -> float:
        """Return the milliseconds from this event to `end`; with GPUs, the maximum over the GPUs."""
        if not self._events:
            return (end._at - self._at) * 1000
        return max(
            float(first.elapsed_time(last)) for first, last in zip(self._events, end._events, strict=True)
        )
