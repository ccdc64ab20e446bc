"""A master and nodes that an mpiexec starts, with collectives over MPI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shoal
from shoal.controller import Master
from tests.support.mpi import WITH_MPICH, Mpi

from . import over_mpi

pytest.importorskip("numpy")

LIMIT_S = 300.0  # nodes wait busily for each other, on fewer cores than there are nodes

_COLLECTIVES = """
import shoal
import shoal.distributed as dist
from tests.controller import over_mpi
with dist.init_master_worker(backend="mpi") as master:
    print(" ".join(over_mpi.digests(master.nodes)))
    print([master.call(node, over_mpi.backends) for node in master.nodes])
    try:
        master.wait_for(3)
    except shoal.UsageError as error:
        print(error)
print("only the master comes here")
"""


@WITH_MPICH
def test_collectives_of_places_have_the_bits_of_the_native_backend(
    mpi: Mpi, master: Master, tmp_path: Path
) -> None:
    outcome = mpi.run(3, _COLLECTIVES, folder=tmp_path, timeout=LIMIT_S)
    assert outcome.code == 0, outcome
    assert outcome.err == "", outcome  # also nothing about processes that end without MPI_Finalize
    digests, backends, refused, last = outcome.out.splitlines()
    assert digests.split() == over_mpi.digests(master.place([0, 1]))
    assert backends == "[['mpi'], ['mpi']]"
    assert refused.startswith("init_master_worker(backend='mpi'): no worker can join this master")
    assert last == "only the master comes here"


_LOSE = """
import os, signal, torch
import shoal
master = shoal.init_master_worker(backend="mpi")
x = master.nodes.replicate(torch.ones(20_000))
print(master.nodes.gather(master.nodes.all_reduce_(x))[2][0])
try:
    master.call(1, os.kill, master.pids[1], signal.SIGKILL)
except shoal.NodeLost as error:
    print(error.ranks)
rest = master.place([0, 2])
y = rest.all_reduce_(rest.replicate(torch.ones(20_000)))
print([each[0].item() for each in rest.gather(y)])
try:
    master.replace(1)
except shoal.UsageError as error:
    print(error)
master.close()
print("ended", flush=True)
"""


@WITH_MPICH
def test_other_nodes_continue_when_one_is_killed(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(4, _LOSE, folder=tmp_path, survives_deaths=True, timeout=LIMIT_S)
    lines = outcome.out.splitlines()
    assert lines[:3] == ["tensor(3.)", "(1,)", "[2.0, 2.0]"], outcome
    assert lines[3].startswith("init_master_worker(backend='mpi'): no worker can join this master"), outcome
    assert lines[4] == "ended", outcome


_START = """
import sys
import shoal
try:
    shoal.init_master_worker(backend="mpi")
except (shoal.UsageError, shoal.ConfigurationError) as error:
    sys.stdout.write(f"{type(error).__name__} {error}\\n")
"""


@WITH_MPICH
def test_a_master_that_is_not_started_by_mpiexec_is_told_to_be(mpi: Mpi, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_START)
    alone = mpi.execute([sys.executable, str(program)], folder=tmp_path, timeout=LIMIT_S)
    assert "UsageError init_master_worker(backend='mpi'): this process is alone" in alone.out, alone
    assert "mpiexec -n 3 python program.py" in alone.out
    launched = mpi.execute(
        [sys.executable, "-m", "shoal", "run", "-n", "2", str(program)], folder=tmp_path, timeout=LIMIT_S
    )
    for rank in range(2):
        text = f"this process rank {rank} and size 2, but in MPI.COMM_WORLD it has rank 0 and size 1"
        assert text in launched.out, launched
    assert launched.out.count("start all ranks with one mpiexec of") == 2


@pytest.mark.parametrize("given", [{"workers": 1}, {"url": "tcp://127.0.0.1:1"}])
def test_nodes_that_mpiexec_does_not_start_are_refused(given: dict[str, object]) -> None:
    name = next(iter(given))
    with pytest.raises(shoal.UsageError, match=rf"\(backend='mpi'\): {name}=: MPI's launcher must start"):
        shoal.init_master_worker(backend="mpi", **given)  # type: ignore[arg-type]
