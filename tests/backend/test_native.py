"""The native backend passes the suite over shared memory, over the network, and over both."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import shoal
from shoal.testing.conformance import BackendConformance


class TestSharedMemory(BackendConformance):
    backend = "native"
    options: ClassVar[dict[str, Any]] = {"transport": "shm"}


class TestNetwork(BackendConformance):
    backend = "native"
    options: ClassVar[dict[str, Any]] = {"transport": "tcp"}


class TestSeveralHosts(BackendConformance):
    backend = "native"

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        hosts = ["left" if rank < (size + 1) // 2 else "right" for rank in range(size)]
        return super().run(fn, size, *args, hosts=hosts, **options)


class TestSeveralLanes(BackendConformance):
    backend = "native"
    options: ClassVar[dict[str, Any]] = {"concurrency": 3}


def test_ranks_with_different_secrets_both_hear_of_it(tmp_path: Path) -> None:
    def meet(rank: int) -> Any:
        try:
            with shoal.init(
                f"file://{tmp_path}/meet", rank=rank, size=2, timeout=60.0, secret=f"secret {rank}"
            ):
                return None
        except shoal.ShoalError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, range(2))
    assert isinstance(second, shoal.AuthenticationError)
    assert isinstance(first, shoal.RendezvousError)
    assert "rank 1 could not connect: AuthenticationError" in str(first)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("concurrency", "algorithm"),
    [((1, 2), ("auto", "auto")), ((1, 1), ("direct", "halving")), ((1, 1), ("auto", "ring"))],
)
def test_ranks_with_different_lanes_or_algorithms_hear_of_just_that(
    tmp_path: Path, transport: str, concurrency: tuple[int, int], algorithm: tuple[str, str]
) -> None:
    def work(rank: int) -> str:
        own: dict[str, Any] = {"concurrency": concurrency[rank], "algorithm": algorithm[rank]}
        with shoal.init(f"file://{tmp_path}/meet", rank=rank, size=2, transport=transport, **own) as group:
            with pytest.raises(shoal.CollectiveMismatch) as caught:
                shoal.wait_all([group.all_reduce(torch.ones(5)) for _ in range(4)])
            return str(caught.value)

    lines = [f"rank {r}: concurrency={concurrency[r]}, algorithm={algorithm[r]}" for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(work, range(2)):
            assert "have different numbers of lanes, or algorithms" in message
            assert "\n  ".join(lines) in message
