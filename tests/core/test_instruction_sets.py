"""A module built on one machine runs on another: only the levels chosen at run time use newer instructions.

The installed module has no symbols left, so the objects it was linked from are looked at.  They are in
``build/`` after an installation from the checkout.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "build"

#: Instructions of AVX and later have names with v and registers of their own; BMI and its like have not.
BEYOND_BASELINE = re.compile(
    r"^\s*[0-9a-f]+:\s+(?:rep |lock )*("
    r"v[a-z0-9]+|andn|bextr|bls(?:i|r|msk)|bzhi|mulx|pdep|pext|rorx|s[ah]rx|shlx|lzcnt|popcnt|movbe"
    r")[lq]?\s|%[yz]mm\d",
    re.MULTILINE,
)
FOR_NEWER = ("level_avx2.cc.o", "level_avx512.cc.o")


@pytest.fixture(scope="module")
def objects() -> list[Path]:
    if platform.machine() != "x86_64":
        pytest.skip("there is one level on this architecture")
    for tool in ("objdump", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    trees = [
        module.parent
        for module in sorted(BUILD.glob("*/_core.*.so"), key=lambda path: path.stat().st_mtime)
        if "SHOAL_SANITIZE:STRING=\n" in (module.parent / "CMakeCache.txt").read_text()
    ]
    if not trees:
        pytest.skip("the module was not built in this checkout")
    return sorted(trees[-1].glob("CMakeFiles/**/*.o"))


def instructions(path: Path) -> str:
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_only_the_levels_for_newer_cpus_use_newer_instructions(objects: list[Path]) -> None:
    using = {path.name for path in objects if BEYOND_BASELINE.search(instructions(path))}
    assert using == set(FOR_NEWER)
    assert {"level_baseline.cc.o", "reduce.cc.o", "group.cc.o", "engine.cc.o"} <= {p.name for p in objects}


def test_the_levels_share_no_function_with_other_objects(objects: list[Path]) -> None:
    """Of equal inline functions the linker keeps any one: it must not find one in a level for newer CPUs."""
    for path in objects:
        if path.name not in FOR_NEWER:
            continue
        lines = subprocess.run(["nm", str(path)], stdout=subprocess.PIPE, text=True, check=True).stdout
        kinds = [line.split()[1] for line in lines.splitlines() if len(line.split()) == 3]
        assert set(kinds) <= set("tdrbD"), f"{path.name} defines more than local functions"
        assert kinds.count("D") == 1, f"{path.name} defines more than its table"
