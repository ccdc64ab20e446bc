"""Environments of the MPI libraries, one for each because their wheels overwrite each other's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path


class Absent(Exception):
    """A contender is not available or failed; the message has the reason."""


def checkout() -> Path | None:
    """The working directory if it is a checkout of shoal, else None."""
    here = Path.cwd()
    return here if (here / "src" / "shoal" / "tools" / "bench").is_dir() else None


def mpi_environment(wheel: str) -> Path:
    """Return an environment with this MPI, mpi4py and numpy; create it if it is missing.

    It is in ``build/bench`` of a checkout (with the versions of its constraints), otherwise in
    ``~/.cache/shoal/bench``.

    Raises:
        `Absent`: pip could not install it.
    """
    root = checkout()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = (root / "build" if root else cache / "shoal") / "bench" / wheel
    if not (where / "bin" / "mpiexec").exists():
        shutil.rmtree(where, ignore_errors=True)
        venv.create(where, with_pip=True)
        pip = [str(where / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
        versions = ["-c", str(root / "constraints.txt")] if root else []
        result = subprocess.run(
            [*pip, *versions, "mpi4py", "numpy", wheel],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if result.returncode:
            raise Absent(f"pip install {wheel}: {last_line(result.stdout)}")
    return where


def last_line(text: str) -> str:
    """The last line of a program's output, usually the reason why it ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
