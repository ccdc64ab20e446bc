"""One rank of ``scaling.py``: executes orders and reports their costs."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

#: name -> (bytes, whether the tensor is registered); None means a barrier
OPERATIONS: dict[str, tuple[int, bool] | None] = {
    "barrier": None,
    "all_reduce 8 B": (8, False),
    "all_reduce 64 KB": (64 * 2**10, False),
    "all_reduce 1 MB, registered": (2**20, True),
    "all_reduce 1 MB, ordinary": (2**20, False),
}


class Rank:
    """Executes orders on one process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.group: Any = None
        self.rows: Any = None
        self.buffers: dict[str, Any] = {}

    @staticmethod
    def imports() -> int:
        """Import torch, then shoal; return the unique memory in bytes that the latter took."""
        import torch

        torch.set_num_threads(1)
        before = psutil.Process().memory_full_info().uss
        import shoal

        # The package loads its names at their first use; a group of one rank uses all of them.
        with shoal.init("env://") as group:
            group.barrier().wait()
        gc.collect()
        return psutil.Process().memory_full_info().uss - before

    @classmethod
    def serve(cls, rank: int, size: int, orders: Connection, inherited: Sequence[Connection]) -> None:
        """Main loop of a forked rank: receive (method, arguments), send the answer or a traceback."""
        for pipe in inherited:
            pipe.close()
        me = cls(rank, size)
        with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has exited
            while True:
                order, arguments = orders.recv()
                try:
                    answer = True, getattr(me, order)(*arguments)
                except Exception:
                    answer = False, traceback.format_exc()
                orders.send(answer)

    def footprint(self) -> dict[str, float]:
        """Return the resources of this process after a garbage collection."""
        gc.collect()
        me = psutil.Process()
        memory = me.memory_full_info()
        status = Path("/proc/self/status").read_text()
        tables = next(line for line in status.splitlines() if line.startswith("VmPTE"))
        return {
            "memory (USS)": memory.uss,
            "memory (PSS)": memory.pss,
            "shared memory, by the rank": _shared(),
            "page tables": int(tables.split()[1]) * 1024,
            "file descriptors": me.num_fds(),
            "threads": me.num_threads(),
        }

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - wall, time.process_time() - cpu

    def init(self, place: str) -> tuple[float, float]:
        import shoal

        def make() -> None:
            self.group = shoal.init(place, rank=self.rank, size=self.size, timeout=280.0)

        return self._timed(make)

    def close(self) -> tuple[float, float]:
        self.buffers.clear()
        return self._timed(self.group.close)

    def split(self) -> tuple[float, float]:
        def split() -> None:
            self.rows = self.group.split(0)

        self.group.barrier().wait()
        return self._timed(split)

    def close_split(self) -> tuple[float, float]:
        return self._timed(self.rows.close)

    def operate(self, name: str, repeat: int) -> tuple[float, float]:
        operation = OPERATIONS[name]
        if operation is None:
            work = self.group.barrier
        else:
            nbytes, registered = operation
            if name not in self.buffers:
                import torch

                make = self.group.empty if registered else torch.empty
                self.buffers[name] = make(nbytes // 4, dtype=torch.float32).zero_()
            buffer = self.buffers[name]

            def work() -> Any:
                return self.group.all_reduce(buffer)

        self.group.barrier().wait()

        def run() -> None:
            for _ in range(repeat):
                work().wait()

        return self._timed(run)


def _shared() -> int:
    """Return the bytes of allocated memory that this process shares with others."""
    for entry in sorted(os.scandir("/proc/self/fd"), key=lambda entry: int(entry.name)):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith("/memfd:shoal"):
                return os.fstat(int(entry.name)).st_blocks * 512
    return 0
