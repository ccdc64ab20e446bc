"""Termination of a contender's processes, and removal of their shared memory."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

#: directory of named shared memory
SHARED = Path("/dev/shm")
#: seconds between SIGTERM, at which mpiexec ends its ranks and removes its files, and SIGKILL
GRACE = 5.0


def end(processes: Sequence[subprocess.Popen[bytes]], patience: float, older: Iterable[str]) -> None:
    """End launchers and their ranks: wait, then send SIGTERM to the launchers, then kill all processes.

    Also removes named shared memory, which killed MPI ranks cannot do. A second Ctrl-C kills at once.

    Args:
        processes: the launchers, or the ranks if there is no launcher.
        patience: seconds that the processes get to end by themselves.
        older: names in :data:`SHARED` that existed before the processes, and are kept.
    """
    # Collected now, because the ranks of a launcher that dies can no longer be found.
    family = _family(processes)
    mapped = {path for member in family for path in _mapped(member.pid)}
    try:
        _wait(processes, patience)
        for process in processes:
            process.terminate()
        _wait(processes, GRACE)
    finally:
        for member in {*family, *_family(processes)}:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        for process in processes:
            process.wait()
        psutil.wait_procs(family, timeout=GRACE)
        for path in mapped:
            if path.parent == SHARED and path.name not in older:
                path.unlink(missing_ok=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _family(processes: Iterable[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    """The running processes and all their descendants."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            found += [parent, *parent.children(recursive=True)]
    return found


def _mapped(pid: int) -> set[Path]:
    """The files in :data:`SHARED` that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # the process has ended
        return set()
    start = f"{SHARED}{os.sep}"
    # Five fields precede the path, which may contain spaces.
    return {
        Path(fields[5])
        for line in lines
        if len(fields := line.split(maxsplit=5)) == 6 and fields[5].startswith(start)
    }
