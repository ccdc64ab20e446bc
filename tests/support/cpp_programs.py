"""Builds C++ programs against the headers and the archive that an installation has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import shoal

SOURCES = Path(__file__).parents[1] / "frontend/cpp"

COMPILER = os.environ.get("CXX", "c++")

#: another archive and other options, for `make sanitize`
ARCHIVE, FLAGS = os.environ.get("CPP_ARCHIVE"), os.environ.get("CPP_FLAGS", "").split()


def installation() -> Path:
    """The folder with ``include`` and ``lib``: of this package, or of the installed one if this is a tree."""
    for root in (Path(shoal.__file__).parent, Path(sysconfig.get_path("purelib")) / "shoal"):
        if (root / "lib/libshoal.a").exists():
            return root
    raise FileNotFoundError("libshoal.a: install shoal (make core)")


def build(source: str, program: Path, options: Sequence[str] = ()) -> Path:
    """Compile and link ``source``, a file of ``tests/frontend/cpp``; return ``program``."""
    root = installation()
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    libraries = [ARCHIVE or str(root / "lib/libshoal.a"), "-pthread", "-ldl", "-lrt"]
    paths = [f"-I{root / 'include'}", str(SOURCES / source), "-o", str(program)]
    subprocess.run([COMPILER, "-O0", "-g1", *warnings, *options, *FLAGS, *paths, *libraries], check=True)
    return program


def compilers() -> list[str]:
    """The C++ compilers of this machine."""
    names = ["g++", *(f"g++-{n}" for n in range(11, 16)), "clang++", *(f"clang++-{n}" for n in range(14, 22))]
    found = {os.path.realpath(path): path for name in names if (path := shutil.which(name))}
    return sorted(found.values())
