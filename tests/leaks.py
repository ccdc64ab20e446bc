"""Counting what a test leaves behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def open_descriptors() -> dict[int, str]:
    """Every open descriptor of this process and what it leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail if there are more descriptors or threads at the end than at the beginning."""
    threads = set(threading.enumerate())
    descriptors = open_descriptors()
    yield
    deadline = time.monotonic() + 10
    while True:
        left = {fd: what for fd, what in open_descriptors().items() if fd not in descriptors}
        alive = [thread for thread in threading.enumerate() if thread not in threads]
        if not left and not alive:
            return
        assert time.monotonic() < deadline, f"left behind: descriptors {left}, threads {alive}"
        gc.collect()  # slow, and seldom needed
        time.sleep(0.01)
