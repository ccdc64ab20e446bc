"""The native backend passes the suite over shared memory, over the network, and over both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from .conformance import BackendConformance


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
