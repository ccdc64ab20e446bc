"""Leak checks: threads, descriptors, memory, child processes, files."""

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

#: default number of seconds that threads and processes get to end
LEAK_TIMEOUT_S = 5.0

#: resources that the fork server of ``processes`` keeps until this process ends
_ignored: set[str] = set()


@contextlib.contextmanager
def no_leaks(patience: float = LEAK_TIMEOUT_S) -> Iterator[None]:
    """Fail if the block leaks resources.

    Compares Python threads, native threads of shoal, open descriptors, mapped anonymous files (memfd),
    shoal's files in ``/dev/shm`` and child processes before and after the block.

    Args:
        patience: seconds to wait for the resources to be released.

    Raises:
        AssertionError: with a list of the leaks.
    """
    before = inventory()
    yield
    gc.collect()
    pool.shutdown()  # otherwise idle callback threads stay for some seconds
    end, again = time.monotonic() + patience, time.monotonic() + patience / 5
    while left := inventory() - before - _ignored:
        if time.monotonic() > end:
            raise AssertionError("left behind: " + "; ".join(sorted(left)))
        if time.monotonic() > again:  # collects garbage of threads that have ended or called back since
            gc.collect()
            pool.shutdown()
            again += patience / 5
        time.sleep(0.005)


@contextlib.contextmanager
def ignoring() -> Iterator[None]:
    """Exclude resources that the block creates from leak checks."""
    before = inventory()
    yield
    _ignored.update(inventory() - before)


def inventory() -> set[str]:
    """Descriptions of all resources of this process."""
    return {*_threads(), *_descriptors(), *_mappings(), *_shared_files(), *_children()}


def left_at(agent: Agent) -> set[str]:
    """Describe the objects, references and calls (with replies being sent) that a worker keeps."""
    stats, name = agent.stats(), agent.name
    found = {f"worker {name!r} keeps {each}" for each in agent.leaks()}
    found |= {f"worker {name!r} {each}" for each in agent.references.describe_held()}
    for count, what in (("calls", "waits for calls"), ("letters", "has calls that wait for a thread"),
                        ("handled", "serves calls")):  # fmt: skip
        if stats[count]:
            found.add(f"worker {name!r} {what}: {stats[count]}")
    return found


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        yield f"thread {thread.name!r} ({thread.native_id})"
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may have ended
            name = (task / "comm").read_text().strip()
            if name.startswith("shoal"):
                yield f"native thread {name!r} ({task.name})"


def _descriptors() -> Iterator[str]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            # listing the directory opens a descriptor
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
