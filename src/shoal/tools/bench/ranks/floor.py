"""The hardware limit ("floor"): the operations as bare loops over shared memory.

All ranks map one memfd. An operation is a spinning barrier, the core's kernel or memcpy on the rank's share,
and a second barrier, without protocol, checks, sleeping or error handling. Reductions are also measured as
numpy expressions, which would reveal a slow kernel. ``memcpy`` is all ranks copying private memory at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....backend.kernels import reduction_kernel
from .engine import STORAGE, Call, ContenderRank, Unsupported, Values

_PAGE = 4096
_LINE = 64
#: size of the area for synchronization: a cache line per rank, and two for the futexes
_HEADER = 16 * _PAGE
#: address space of one rank; a page more than a power of two, to avoid cache conflicts between ranks
_REGION = 2**32 + _PAGE
_KERNELS = {"fp32": reduction_kernel(torch.float32), "bf16": reduction_kernel(torch.bfloat16)}
_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1


class HardwareLimit(ContenderRank):
    """A rank that communicates through shared memory."""

    def __init__(self, control: str, hosts: int) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = f"numpy {np.__version__}"
        length = _HEADER + self.size * _REGION
        self._memory = mmap.mmap(self._open(control, length), length)
        self._words = memoryview(self._memory)[:_HEADER].cast("Q")
        self._base = np.frombuffer(self._memory, np.uint8, 1).ctypes.data
        self._round = 0
        self._crowded = self.size > len(os.sched_getaffinity(0))
        self._used = 0

    def _open(self, control: str, length: int) -> int:
        """Return the memfd, which rank 0 creates and the others open through /proc."""
        told = Path(control + ".floor")
        if self.rank == 0:
            fd = os.memfd_create("shoal-bench")
            os.ftruncate(fd, length)
            new = told.with_suffix(".new")
            new.write_text(f"/proc/{os.getpid()}/fd/{fd}")
            new.rename(told)
            return fd
        while not told.exists():
            time.sleep(0.01)
        return os.open(told.read_text(), os.O_RDWR)

    def _start_of(self, rank: int) -> int:
        return _HEADER + rank * _REGION

    def empty(self, variant: str, dtype: str, count: int) -> tuple[Any, Values]:
        if variant == "memcpy":
            x = np.empty(count, STORAGE[dtype])
            return x, x
        # At the same offset on every rank, so that ranks find the buffers of the others.
        pages = -(-count * STORAGE[dtype]().itemsize // _PAGE) + 1
        at, self._used = self._used, self._used + pages * _PAGE
        if self._used > _REGION:
            raise Unsupported(f"larger than the {_REGION} bytes of a rank")
        x = np.frombuffer(self._memory, STORAGE[dtype], count, self._start_of(self.rank) + at)
        return x, x

    def release(self) -> None:
        first, last = self._start_of(self.rank), self._start_of(self.rank) + _REGION
        self._memory.madvise(mmap.MADV_REMOVE, first, last - first)
        self._used = 0

    def barrier(self) -> None:
        """Spin until all ranks have arrived; yield the CPU if there are fewer cores than ranks."""
        self._round += 1
        words, number, crowded = self._words, self._round, self._crowded
        words[8 * self.rank] = number
        for word in range(0, 8 * self.size, 8):
            while words[word] < number:
                if crowded:
                    os.sched_yield()

    def checked(self, variant: str) -> bool:
        return variant != "memcpy"

    def operation(self, name: str, x: Any, out: Any, variant: str) -> Call:
        if variant == "memcpy":
            target = np.empty_like(x)
            target[:] = 0
            return lambda: np.copyto(target, x)
        if name == "barrier":
            return self.barrier
        work = self._work(name, x, out, variant)
        if name == "send_recv":
            return self._one_way_each(work)
        barrier = self.barrier

        def call() -> None:
            barrier()
            work()
            barrier()

        return call

    def _one_way_each(self, work: Call) -> Call:
        """Rank 1 copies from rank 0, then rank 0 from rank 1."""
        if self.rank > 1:
            return lambda: None
        words, mine = self._words, 8 * self.rank + 4
        theirs = 8 * (1 - self.rank) + 4
        first = self.rank == 0
        # Separate words, because the other ranks do not take part in these barriers.
        number = words[mine]

        def meet() -> None:
            nonlocal number
            number += 1
            words[mine] = number
            while words[theirs] < number:
                if self._crowded:
                    os.sched_yield()

        def call() -> None:
            meet()
            if not first:
                work()
            meet()
            if first:
                work()
            meet()

        return call

    # -- this rank's share ---------------------------------------------------------------------

    def _views(self, x: Values) -> list[Values]:
        """This buffer on every rank."""
        at = x.ctypes.data - self._base - self._start_of(self.rank)
        return [
            np.frombuffer(self._memory, x.dtype, len(x), self._start_of(rank) + at)
            for rank in range(self.size)
        ]

    def _work(self, name: str, x: Values, out: Values | None, variant: str) -> Call:
        views, rank, size = self._views(x), self.rank, self.size
        if name == "all_reduce":
            # Whole cache lines, to avoid false sharing between ranks.
            step = _LINE // x.itemsize
            lines = -(-len(x) // step)
            first = min(len(x), rank * lines // size * step)
            last = min(len(x), (rank + 1) * lines // size * step)
            shares = [view[first:last] for view in views]
            return _numpy_sum(shares) if variant == "numpy" else _kernel_sum(shares, shares)
        if name == "broadcast":
            return (lambda: None) if rank == 0 else _copies([(x, views[0])])
        if name == "send_recv":
            return _copies([(x, views[(rank + 1) % 2])])
        assert out is not None
        part = len(out) if name == "reduce_scatter_single" else len(out) // size
        if name == "reduce_scatter_single":
            return _kernel_sum([out], [view[rank * part : (rank + 1) * part] for view in views])
        first = rank * part if name == "all_to_all_single" else 0
        return _copies(
            [(out[r * part : (r + 1) * part], views[r][first : first + part]) for r in range(size)]
        )

    # -- futexes -------------------------------------------------------------------------------

    def futex_round_trip(self, repeat: int) -> None:
        """Let ranks 0 and 1 wake each other ``repeat`` times each, always through the kernel."""
        number = _FUTEX.get(platform.machine())
        if number is None:
            raise Unsupported(f"the number of the futex system call is not known on {platform.machine()}")
        if self.rank > 1:
            return
        syscall = ctypes.CDLL(None).syscall
        # Two 32-bit words in separate cache lines, after those of the barrier.
        offset = _LINE * self.size
        words = memoryview(self._memory)[offset : offset + 2 * _LINE].cast("I")
        mine, theirs = self.rank * 16, (1 - self.rank) * 16
        address = self._base + offset
        number_, mine_at, theirs_at = ctypes.c_long(number), address + 4 * mine, address + 4 * theirs

        def wake() -> None:
            words[theirs] = 1
            syscall(number_, ctypes.c_void_p(theirs_at), _WAKE, 1, None, None, 0)

        def wait() -> None:
            while not words[mine]:
                syscall(number_, ctypes.c_void_p(mine_at), _WAIT, 0, None, None, 0)
            words[mine] = 0

        for _ in range(repeat):
            if self.rank == 0:
                wake()
                wait()
            else:
                wait()
                wake()


def _kernel_sum(destinations: Sequence[Values], sources: Sequence[Values]) -> Call:
    kernel = _KERNELS["fp32" if sources[0].dtype == np.float32 else "bf16"]
    to, of = [view.ctypes.data for view in destinations], [view.ctypes.data for view in sources]
    count = len(sources[0])
    return lambda: kernel(to, of, count)


def _numpy_sum(shares: Sequence[Values]) -> Call:
    first, rest = shares[0], shares[1:]

    def work() -> None:
        for other in rest:
            np.add(first, other, out=first)
        for other in rest:
            np.copyto(other, first)

    return work


def _copies(pairs: Sequence[tuple[Values, Values]]) -> Call:
    def work() -> None:
        for to, of in pairs:
            np.copyto(to, of)

    return work
