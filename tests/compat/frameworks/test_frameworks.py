"""Accelerate and Lightning Fabric train on the shoal backend as on Gloo, by their ordinary configuration.

Each program does everything twice in the same processes: on shoal, set up as a user would, and on Gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ports import free_port
from tests.support.quick_launcher import QuickLauncher

PROGRAMS = Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
SHOAL_RUN = ("-m", "shoal", "run", "-n", "2")

#: a script around a program, with variables as under torchrun and `accelerate launch`
FORKED = """
import os, runpy
os.chdir({folder!r})
os.environ |= {{"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}}
runpy.run_path({program!r}, run_name="__main__")
"""

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
needs_fabric = pytest.mark.skipif(find_spec("lightning_fabric") is None, reason="lightning is not installed")


def run(program: str, folder: Path, *launcher: str, **environment: str) -> list[dict[str, Any]]:
    """Each rank's results; nothing may be said on stderr, or go wrong."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PET_MASTER_PORT": str(free_port()),  # for torchrun, whose default is one port for all jobs
        **environment,
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAMS / program), str(folder)],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,  # on a busy machine: importing Lightning takes each process eight seconds of a core
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return loaded(folder)


def loaded(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    """Bit for bit, through dictionaries and lists."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in ours.items():
            assert_equal(value, theirs[key], f"{where}, {key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, value in enumerate(ours):
            assert_equal(value, theirs[index], f"{where}[{index}]")
    else:
        assert ours == theirs, where


def check(results: list[dict[str, Any]]) -> None:
    """On both ranks, on shoal as on Gloo."""
    for rank, found in enumerate(results):
        assert found["shoal"].pop("backend") == "shoal"
        assert found["gloo"].pop("backend") == "gloo"
        assert_equal(found["shoal"], found["gloo"], f"rank {rank}")


@needs_accelerate
def test_accelerate_trains_in_forks_of_a_launcher(launcher: QuickLauncher, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(FORKED.format(folder=str(tmp_path), program=str(PROGRAMS / "accelerate_program.py")))
    code, out, err = launcher.run(2, str(script), str(tmp_path))
    assert (code, err) == (0, ""), out + err
    check(loaded(tmp_path))


@needs_accelerate
@pytest.mark.stress
@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        pytest.param(TORCHRUN, {"ACCELERATE_USE_CPU": "true"}, id="torchrun"),
        # Under which test_page.py runs, also with Accelerator(cpu=True).
        pytest.param(SHOAL_RUN, {}, id="shoal run"),
    ],
)
def test_accelerate_trains_under(
    launcher: tuple[str, ...], variables: dict[str, str], tmp_path: Path
) -> None:
    check(run("accelerate_program.py", tmp_path, *launcher, **variables))


@needs_fabric
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((), id="its own launcher", marks=pytest.mark.stress),  # 20 to 50 s
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.stress),  # under which Accelerate is tried
        pytest.param(SHOAL_RUN, id="shoal run", marks=pytest.mark.stress),  # under which test_page.py runs
    ],
)
def test_fabric_trains_by_ddp_and_fsdp2_under(launcher: tuple[str, ...], tmp_path: Path) -> None:
    check(run("fabric_program.py", tmp_path, *launcher))
