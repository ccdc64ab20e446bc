"""The little of a debugger that tests need: it holds a process, or one that ends in the middle of its end.

The kernel knows the thread that began as the debugger, so one thread does all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_TRACE_EXIT = 0x40
_ANY_THREAD = 0x40000000  # __WALL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace of process {pid}: {os.strerror(ctypes.get_errno())}")


def _stopped(thread: int) -> None:
    """Wait until the thread stands still for us."""
    os.waitpid(thread, _ANY_THREAD)


@contextlib.contextmanager
def held_at_its_end(pid: int) -> Iterator[None]:
    """If the process dies in the block, its first thread comes to the end of the block and no further."""
    _ptrace(_SEIZE, pid, _TRACE_EXIT)
    try:
        yield
    finally:
        _stopped(pid)
        _ptrace(_DETACH, pid)


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """All threads of the process stand still, as in a debugger at a breakpoint; it must outlive the block."""
    threads = []
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        try:
            _ptrace(_SEIZE, thread)
        except ProcessLookupError:  # it has just ended
            continue
        _ptrace(_INTERRUPT, thread)
        _stopped(thread)
        threads.append(thread)
    try:
        yield
    finally:
        for thread in threads:
            _ptrace(_DETACH, thread)
