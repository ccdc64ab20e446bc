"""The same meeting under the real launchers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from tests.support.mpi import mpiexec_of
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]

_PROGRAM = """
import sys
from shoal.rendezvous import rendezvous
for _ in range(2):
    member = rendezvous(timeout=60)
    member.store.set(str(member.rank), b"1")
    member.store.wait(["0", "1"])
    member.release(30)
# one write, so that the lines of two ranks do not mix
sys.stdout.write(f"rank {member.rank} of {member.size}, local {member.local_rank} of {member.local_size}\\n")
"""


# Under torchrun one script of tests/compat/launching meets in the same way.
@pytest.mark.parametrize(
    "name",
    [
        "mpich",
        "openmpi",
        *(pytest.param(name, marks=pytest.mark.stress) for name in ("openmpi 5", "torchrun")),
    ],
)
def test_ranks_meet_under(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    else:
        monkeypatch.chdir(ROOT)
        launcher = [mpiexec_of(name), "-n", "2", sys.executable]
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(shoal.__file__).parent.parent),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",  # or torchrun talks about it
        "PET_MASTER_PORT": str(free_port()),  # for torchrun, whose default is one port for all jobs
        # Open MPI refuses root, and more ranks than cores, unless told otherwise.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    result = subprocess.run([*launcher, script], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"rank (\d) of 2, local (\d) of 2", result.stdout)
    assert sorted(found) == [("0", "0"), ("1", "1")]
    assert list(tmp_path.glob("shoal-*/*")) == []
