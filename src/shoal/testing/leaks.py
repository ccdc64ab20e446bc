"""Whether something was left behind: threads, descriptors, memory, children, files."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ..future import pool
from ..rpc import Agent

#: seconds in which threads and processes that are ending must have ended
_PATIENCE = 5.0

#: resources that the fork server of ``processes`` holds as long as this process lives
_ignored: set[str] = set()


@contextlib.contextmanager
def no_leaks(patience: float = _PATIENCE) -> Iterator[None]:
    """Fail if the block leaves behind what was not there before.

    It compares Python threads, native threads of shoal, open descriptors, mapped anonymous files
    (memfd), shoal's files in ``/dev/shm`` and child processes.

    Args:
        patience: seconds that what is ending gets to end.

    Raises:
        AssertionError: lists what was left behind.
    """
    before = inventory()
    yield
    gc.collect()
    pool.shutdown()  # idle threads for callbacks would stay for some seconds
    end, again = time.monotonic() + patience, time.monotonic() + patience / 5
    while left := inventory() - before - _ignored:
        if time.monotonic() > end:
            raise AssertionError("left behind: " + "; ".join(sorted(left)))
        if time.monotonic() > again:  # what a thread left that has ended meanwhile, or has called back since
            gc.collect()
            pool.shutdown()
            again += patience / 5
        time.sleep(0.005)


@contextlib.contextmanager
def ignoring() -> Iterator[None]:
    """Count nothing that the block makes as a leak."""
    before = inventory()
    yield
    _ignored.update(inventory() - before)


def inventory() -> set[str]:
    """The resources of this process, with a description for each."""
    return {*_threads(), *_descriptors(), *_mappings(), *_shared_files(), *_children()}


def left_at(agent: Agent) -> set[str]:
    """Objects, references and calls that a worker keeps for others now, in words.

    A call whose reply is being sent counts too.
    """
    stats, name = agent.stats(), agent.name
    found = {f"worker {name!r} keeps {each}" for each in agent.leaks()}
    found |= {f"worker {name!r} {each}" for each in agent.references.standing()}
    for count, what in (("calls", "waits for calls"), ("letters", "has calls that wait for a thread"),
                        ("handled", "serves calls")):  # fmt: skip
        if stats[count]:
            found.add(f"worker {name!r} {what}: {stats[count]}")
    return found


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        yield f"thread {thread.name!r} ({thread.native_id})"
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may have ended just now
            name = (task / "comm").read_text().strip()
            if name.startswith("shoal"):
                yield f"native thread {name!r} ({task.name})"


def _descriptors() -> Iterator[str]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            # listing the directory opens a descriptor of its own
            if not target.startswith("/proc/") or not stat.S_ISDIR(os.stat(target).st_mode):
                yield f"descriptor {entry} -> {target}"


def _mappings() -> Iterator[str]:
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:" in line:
                yield f"mapping of {line.split(None, 5)[-1].strip()} at {line.split('-')[0]}"


def _shared_files() -> Iterator[str]:
    for path in Path("/dev/shm").glob("*shoal*"):
        yield str(path)


def _children() -> Iterator[str]:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield f"child process {child.pid} {child.name()}"
