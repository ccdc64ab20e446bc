"""Limits of the control groups (cgroups) that this process is in, version 1 or 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
#: version 1 writes a number near 2**63 for "no limit"
_NO_LIMIT = 2**60


def cpu_quota() -> float | None:
    """Return the number of cores' worth of CPU time that this process may use; None: no quota."""
    found = []
    for folder in _folders("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def memory() -> tuple[int, int] | None:
    """Return limit and use of memory in bytes, where the least is left; None: no limit."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    return _tightest("memory", names)


def processes() -> tuple[int, int] | None:
    """Return limit and number of processes and threads, where the least is left; None: no limit."""
    return _tightest("pids", (("pids.max", "pids.current"),))


def _tightest(controller: str, names: tuple[tuple[str, str], ...]) -> tuple[int, int] | None:
    found = []
    for folder in _folders(controller):
        for limit, current in names:
            with suppress(OSError, ValueError):  # "max" is no number
                value = int((folder / limit).read_text())
                if value < _NO_LIMIT:
                    found.append((value, int((folder / current).read_text())))
    return min(found, key=lambda each: each[0] - each[1], default=None)


def _folders(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it; in a container some do not exist."""
    try:
        lines = _MEMBERSHIP.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        number, names, path = [*line.split(":", 2), "", "", ""][:3]
        if number == "0":
            root = ROOT
        elif controller in names.split(","):
            root = ROOT / names
        else:
            continue
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            yield root / part
