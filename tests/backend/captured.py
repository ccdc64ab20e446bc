"""Collectives that a graph captures, on a simulated device and on a GPU.

``capture()`` is a context in which the current stream captures; it gives a function that replays the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from shoal import ProcessGroup, ReduceOp
from shoal.errors import UsageError

Capture = Callable[[], AbstractContextManager[Callable[[], object]]]


def replays_have_the_results_of_eager_calls(
    group: ProcessGroup, device: torch.device, capture: Capture
) -> None:
    x = torch.zeros(64, device=device)

    def step() -> torch.Tensor:
        future = group.all_reduce(x * 2 + group.rank)
        beside = x + 1
        largest = group.all_reduce(x - group.rank, "max").wait(blocking=False)
        return future.wait(blocking=False) + beside * largest

    step()
    with capture() as replay:
        z = step()
    for i in range(1000):
        x.fill_(i % 97)
        replay()
        if i % 250 == 0:
            assert torch.equal(z, step())
        expected = group.size * 2 * (i % 97) + sum(range(group.size)) + (i % 97 + 1) * (i % 97)
        assert z[-1].item() == expected


def every_collective_can_be_captured(group: ProcessGroup, device: torch.device, capture: Capture) -> None:
    steps = list(_steps(group, device))
    inputs = [torch.zeros(4, group.size, dtype=dtype, device=device) for dtype, _ in steps]

    def change(seed: int) -> None:
        for x in inputs:
            values = torch.arange(x.numel()) * (seed + 2) % 7 + group.rank
            x.copy_(values.view(x.shape))
            if x.is_floating_point():
                x[0, 0] = float("nan") if group.rank == seed else 1.0

    def run() -> list[torch.Tensor]:
        return [y for x, (_, step) in zip(inputs, steps, strict=True) for y in step(x)]

    change(0)
    run()
    with capture() as replay:
        found = run()
    for seed in range(3):
        change(seed)
        replay()
        for y, expected in zip(found, run(), strict=True):
            assert torch.equal(_bytes(y), _bytes(expected)), (y, expected)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.cpu().contiguous().numpy()).view(torch.uint8)


def _steps(
    group: ProcessGroup, device: torch.device
) -> Iterator[tuple[torch.dtype, Callable[[torch.Tensor], list[torch.Tensor]]]]:
    """A dtype and a function of an input with a column for each rank."""
    size, rank, last = group.size, group.rank, group.size - 1

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        return [part.clone() for part in x.split(1, 1)]

    def rooms(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(part) for part in parts(x)]

    def reduced(op: Any) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        return lambda x: [group.all_reduce(x.clone(), op).wait(blocking=False)]

    def transposed(x: torch.Tensor) -> list[torch.Tensor]:
        return [group.all_reduce(x.clone().t()).wait(blocking=False)]

    def rooted(x: torch.Tensor) -> list[torch.Tensor]:
        y, z, received = x.clone(), x.clone(), torch.empty(4, 1, dtype=x.dtype, device=device)
        group.reduce(y, last, "max").wait(blocking=False)
        group.broadcast(z, last).wait(blocking=False)
        scattered = group.scatter(received, parts(x) if rank == last else None, last)
        gathered = group.gather(
            x.clone(), [torch.empty_like(x) for _ in range(size)] if rank == last else None, last
        )
        return [y, z, scattered.wait(blocking=False), *(gathered.wait(blocking=False) or [])]

    def gathered(x: torch.Tensor) -> list[torch.Tensor]:
        joined = group.all_gather_single(
            torch.empty(size * x.numel(), dtype=x.dtype, device=device), x.clone()
        )
        listed = group.all_gather(x.clone())
        return [joined.wait(blocking=False), *listed.wait(blocking=False)]

    def scattered(op: Any) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        def step(x: torch.Tensor) -> list[torch.Tensor]:
            joined = group.reduce_scatter_single(torch.empty(4, dtype=x.dtype, device=device), x.clone(), op)
            listed = group.reduce_scatter(torch.empty(4, 1, dtype=x.dtype, device=device), parts(x), op)
            return [joined.wait(blocking=False), listed.wait(blocking=False)]

        return step

    def exchanged(x: torch.Tensor) -> list[torch.Tensor]:
        return group.all_to_all(rooms(x), parts(x)).wait(blocking=False)

    def exchanged_unevenly(x: torch.Tensor) -> list[torch.Tensor]:
        sent, received = [to + 1 for to in range(size)], [rank + 1] * size
        out = torch.empty(sum(received), dtype=x.dtype, device=device)
        given = x.flatten()[: sum(sent)]
        return [group.all_to_all_single(out, given, received, sent).wait(blocking=False)]

    for op in ("sum", "min", "max", "avg", ReduceOp.premul_sum(0.5)):
        yield torch.float32, reduced(op)
    yield torch.int16, reduced("sum")
    yield torch.bool, reduced("bor")
    yield torch.int32, reduced("avg")
    yield torch.complex64, reduced("product")
    yield torch.float32, transposed
    yield torch.float32, rooted
    yield torch.int16, rooted
    yield torch.float32, gathered
    yield torch.float32, scattered("min")
    yield torch.int16, scattered("bor")
    yield torch.float32, exchanged
    yield torch.int16, exchanged_unevenly


def what_a_capture_cannot_have_is_refused(
    group: ProcessGroup, device: torch.device, capture: Capture
) -> None:
    """Needs a group without a communicator yet."""
    x = torch.ones(4, device=device)
    with capture() as replay:
        y = x * 2
        with pytest.raises(UsageError, match="has not run a collective on the device; call it once"):
            group.all_reduce(y)
    replay()
    earlier = group.all_reduce(torch.ones(4, device=device))
    earlier.wait()
    with capture() as replay:
        future = group.all_reduce(x * 3)
        with pytest.raises(UsageError, match=r"call wait\(blocking=False\) during the capture"):
            future.wait()
        for blocking in (True, False):
            with pytest.raises(UsageError, match="enqueued before it: wait before the capture begins"):
                earlier.wait(blocking=blocking)
        if group.size > 1:
            with pytest.raises(
                UsageError, match=r"send on rank . of group .* cannot be captured into a graph"
            ):
                group.send(x, 1 - group.rank)
        z = future.wait(blocking=False)
    replay()
    assert z.sum().item() == 12 * group.size
    with pytest.raises(UsageError, match=r"call wait\(blocking=False\) during the capture"):
        future.wait()


def a_callback_can_compute_but_not_call_a_collective(
    group: ProcessGroup, device: torch.device, capture: Capture
) -> None:
    x = torch.zeros(4, device=device)
    group.all_reduce(x).wait()
    with capture() as replay:
        future = group.all_reduce(x + 1)
        y = future.then(lambda f: f.value() * 2).wait(blocking=False)
        with pytest.raises(UsageError, match="in a callback cannot be captured into a graph"):
            future.then(lambda f: group.all_reduce(f.value())).wait(blocking=False)
    for value in (1.0, 2.0):
        x.fill_(value)
        replay()
        assert y.tolist() == [2 * group.size * (value + 1)] * 4


BODIES = (
    replays_have_the_results_of_eager_calls,
    every_collective_can_be_captured,
    what_a_capture_cannot_have_is_refused,
    a_callback_can_compute_but_not_call_a_collective,
)
