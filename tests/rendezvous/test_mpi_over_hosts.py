"""Jobs that a real mpiexec starts on two hosts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.testing import Network
from tests.support.machines import Machines, why_none
from tests.support.mpi import find, open_mpi_of_system

SOURCE = Path(shoal.__file__).parent.parent

_PROGRAM = """
import os, shoal, sys, torch
with shoal.init(timeout=60) as group:
    x = torch.tensor([float(group.rank + 1)])
    group.all_reduce(x).wait()
    place = f"{os.uname().nodename}, local {group.local_rank}"
    sys.stdout.write(f"rank {group.rank} of {group.size} on {place}: {x.item():g}\\n")
    sys.stdout.flush()
    try:
        group.barrier().wait()
        if group.rank == 2:
            os._exit(7)
        group.all_reduce(x).wait(60)
    except shoal.PeerLost as error:
        sys.stdout.write(f"rank {group.rank} lost {error.ranks}\\n")
        sys.exit(3)
"""


def why_no_mpi() -> str:
    """Why there can be no Open MPI over several hosts here, in words; empty if there can."""
    if missing := why_none():
        return f"no mpiexec over hosts: {missing}"
    if open_mpi_of_system() is None:
        return "no mpiexec over hosts: there is none of Open MPI (Debian: apt install openmpi-bin)"
    return ""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if reason := why_no_mpi():
        pytest.skip(reason)
    with Network("a", "b") as network, Machines(network, tmp_path) as machines:
        yield machines


def _mpiexec(machines: Machines, program: str, *options: str) -> list[str]:
    """Three ranks: two on a, one on b."""
    mpiexec = open_mpi_of_system()
    assert mpiexec is not None
    launcher = [mpiexec, "--allow-run-as-root", "--oversubscribe", "--host", "a:2,b:1"]
    return [
        *launcher, "--mca", "plm_rsh_agent", str(machines.remote_shell), "-x", "PYTHONPATH", *options,
        sys.executable, "-c", program,
    ]  # fmt: skip


def _told(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(SOURCE), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def _place(folder: Path) -> list[str]:
    """As the page of the launcher says."""
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("of the test")
    return ["-x", "SHOAL_STORE=tcp://a:29400", "-x", f"SHOAL_SECRET_FILE={secret}"]


def test_ranks_meet_at_the_host_that_was_named_and_name_the_one_that_exits(
    machines: Machines, tmp_path: Path
) -> None:
    # Else mpiexec ends the others, perhaps before they can say whom they have lost; now its own code is 0.
    patient = ["--mca", "orte_abort_on_non_zero_status", "0"]
    command = _mpiexec(machines, _PROGRAM, *patient, *_place(tmp_path))
    _, said = machines.run("a", command, environment=_told(tmp_path))
    assert sorted(re.findall(r"^rank .*", said, re.M)) == [
        "rank 0 lost (2,)",
        "rank 0 of 3 on a, local 0: 6",
        "rank 1 lost (2,)",
        "rank 1 of 3 on a, local 1: 6",
        "rank 2 of 3 on b, local 0: 6",
    ]


def test_mpiexec_ends_with_the_code_of_the_rank_that_failed(machines: Machines, tmp_path: Path) -> None:
    program = (
        "import sys; from shoal.rendezvous import rendezvous; member = rendezvous(timeout=60); "
        "member.release(60); sys.exit(7 if member.rank == 2 else 0)"
    )
    command = _mpiexec(machines, program, *_place(tmp_path))
    code, said = machines.run("a", command, environment=_told(tmp_path))
    assert code == 7, said
    assert re.search(r"Process name: .*,2\]", said)


def test_ranks_that_were_not_told_where_to_meet_say_how_mpiexec_does_it(
    machines: Machines, tmp_path: Path
) -> None:
    program = "import shoal.rendezvous; shoal.rendezvous.rendezvous(timeout=60)"
    code, said = machines.run("a", _mpiexec(machines, program), environment=_told(tmp_path))
    assert code == 1
    assert "mpiexec -x SHOAL_STORE=tcp://FIRST-HOST:29400 -x SHOAL_SECRET_FILE=PATH" in said


def test_ranks_of_two_hosts_learn_over_mpi_where_to_meet(machines: Machines, tmp_path: Path) -> None:
    if isinstance(found := find("openmpi"), str):
        pytest.skip(found)
    program = (
        "import sys; from shoal.rendezvous import rendezvous; member = rendezvous('mpi://', timeout=60); "
        "where = 'loopback' if member.interface.startswith('127.') else 'network'; "
        "sys.stdout.write(f'rank {member.rank} of {member.size}, local {member.local_rank} of "
        "{member.local_size}, {where}, {len(member.secret)}\\n'); member.release(60)"
    )
    environment = {**_told(tmp_path), **found.env}
    code, said = machines.run(
        "a", _mpiexec(machines, program, "-x", "MPI4PY_LIBMPI"), environment=environment
    )
    assert code == 0, said
    assert sorted(re.findall(r"^rank .*", said, re.M)) == [
        "rank 0 of 3, local 0 of 2, network, 64",
        "rank 1 of 3, local 1 of 2, network, 64",
        "rank 2 of 3, local 0 of 1, network, 64",
    ]
