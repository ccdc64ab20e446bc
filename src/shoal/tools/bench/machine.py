"""A description of the machine of a measurement."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import psutil


def machine() -> dict[str, str]:
    """Processor, cores, memory, system and Python, for readers."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return {
        "processor": match[1].strip() if match else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def description() -> str:
    """The machine in one line."""
    here = machine()
    return f"{here['cores']} cores ({here['processor']}), {here['memory']}, {here['system']}"
