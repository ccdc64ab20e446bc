"""Jobs under a real srun, on two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import shoal
from tests.support.machines import LONG
from tests.support.slurm_cluster import SlurmCluster, slurm, why_no_slurm
from tests.support.waiting import until

__all__ = ["slurm"]

SOURCE = Path(shoal.__file__).parent.parent
ROOT = Path(__file__).resolve().parents[2]

_EXITS_WITH_7 = """
import os, shoal, sys, torch
with shoal.init(timeout=60) as group:
    x = torch.tensor([float(group.rank + 1)])
    group.all_reduce(x).wait()
    sys.stdout.write(f"rank {group.rank} of {group.size}: {x.item():g}\\n")
    sys.stdout.flush()
    try:
        group.barrier().wait()
        if group.rank == 2:
            os._exit(7)
        group.all_reduce(torch.ones(1)).wait(60)
    except shoal.PeerLost as error:
        sys.stdout.write(f"rank {group.rank} lost {error.ranks}\\n")
        sys.exit(3)
"""

# Rank 2 is killed, then rank 1 is told to leave.
_ELASTIC = """
import os, shoal, signal, sys, torch
from shoal import elastic
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
x = torch.ones(64, 4)
state = elastic.State(model=net, samples=elastic.Samples(64, batch=12))
lasts = len(sys.argv) > 1
with elastic.Session(state, min_size=2 if lasts else 1) as session:
    model = session.parallel(net)
    me = session.group.rank
    for step in session.steps(until=None if lasts else 30):
        with step:
            if not lasts and (me, step.number) in ((2, 5), (1, 10)):
                os.kill(os.getpid(), signal.SIGKILL if me == 2 else signal.SIGTERM)
            (model(x[step.indices]).square().mean() * step.weight).backward()
            step.commit()
            net.zero_grad()
        if lasts and step.number == 3:
            sys.stdout.write("trains\\n")
            sys.stdout.flush()
    changes = [(event.lost, event.left) for event in session.events]
    sys.stdout.write(f"rank {me}: left {session.left}, {state.steps} steps, {changes}\\n")
"""

_TORCH = """
import os, sys, torch
import shoal.compat
import torch.distributed as dist
dist.init_process_group("shoal")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
group = dist.new_group(list(range(dist.get_world_size())))
names = [None] * dist.get_world_size()
dist.all_gather_object(names, os.environ["SLURMD_NODENAME"], group=group)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x.item():g} {''.join(names)}\\n")
dist.destroy_process_group()
"""

_PLACE = """
import os, sys
from shoal.rendezvous import rendezvous
member = rendezvous(timeout=60)
told = os.environ.get("SLURM_RESTART_COUNT")
sys.stdout.write(f"{member.rank}/{member.size} epoch {member.epoch} restarts {told}\\n")
member.release(30)
"""


def _srun(program: str, *options: str) -> list[str]:
    return ["srun", "--overcommit", *options, sys.executable, "-c", program]


@pytest.fixture
def told(tmp_path: Path) -> dict[str, str]:
    """What the ranks find in their environment."""
    return {
        "PYTHONPATH": str(SOURCE),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "SHOAL_SECRET": "of the test",
    }


def test_ranks_on_one_node_need_no_secret(slurm: SlurmCluster, told: dict[str, str]) -> None:
    del told["SHOAL_SECRET"]
    code, said = slurm.run(_srun(_PLACE, "-N1", "-n3"), told)
    assert code == 0, said
    assert sorted(re.findall(r"./.*", said)) == [f"{rank}/3 epoch 0 restarts None" for rank in range(3)]


def test_two_nodes_without_a_secret_are_refused(slurm: SlurmCluster, told: dict[str, str]) -> None:
    del told["SHOAL_SECRET"]
    code, said = slurm.run(_srun(_PLACE, "-N2", "-n2"), told)
    assert code == 1
    assert re.search(r"Slurm: .* has no secret: .*openssl rand", said)


def test_ranks_on_two_nodes_name_the_one_that_exits_and_srun_ends_with_its_code(
    slurm: SlurmCluster, told: dict[str, str]
) -> None:
    code, said = slurm.run(_srun(_EXITS_WITH_7, "-N2", "-n3"), told)
    assert code == 7, said
    sums = [f"rank {rank} of 3: 6" for rank in range(3)]
    assert sorted(re.findall(r"^rank .*", said, re.M)) == sorted(
        [*sums, "rank 0 lost (2,)", "rank 1 lost (2,)"]
    )


@pytest.mark.parametrize(("nodes", "where"), [("1", "aa"), ("2", "aab")])
def test_torch_distributed_needs_nothing_but_srun(
    slurm: SlurmCluster, told: dict[str, str], tmp_path: Path, nodes: str, where: str
) -> None:
    """``torch.distributed.init_process_group("shoal")`` reads Slurm's variables."""
    if nodes == "1":
        del told["SHOAL_SECRET"]
    size, total = len(where), sum(range(len(where) + 1))
    code, said = slurm.run(_srun(_TORCH, f"-N{nodes}", f"-n{size}"), told)
    assert code == 0, said
    assert sorted(said.splitlines()) == [f"rank {rank} of {size}: {total} {where}" for rank in range(size)]
    assert not list(tmp_path.glob("shoal-*/*"))


def test_an_elastic_job_goes_on_through_a_kill_and_a_rank_that_leaves(
    slurm: SlurmCluster, told: dict[str, str]
) -> None:
    code, said = slurm.run(_srun(_ELASTIC, "-N2", "-n3", "--kill-on-bad-exit=0"), told)
    # srun ends with the highest code of all ranks, here that of the one that was killed.
    assert code == 128 + 9, said
    assert sorted(re.findall(r"rank .*", said)) == [
        "rank 0: left False, 30 steps, [((2,), ()), ((), (1,))]",
        "rank 1: left True, 11 steps, [((2,), ())]",
    ]


def test_a_job_that_gets_sigusr1_before_its_time_is_up_ends_after_the_step(
    slurm: SlurmCluster, told: dict[str, str], tmp_path: Path
) -> None:
    options = ["-N2", "-n2", "--job-name=lasts", f"--output={tmp_path}/said"]
    command = [*_srun(_ELASTIC, *options), "lasts"]
    with slurm.start(command, told) as program:
        said = tmp_path / "said"
        until(
            lambda: program.ended or (said.exists() and said.read_text().count("trains") == 2), patience=LONG
        )
        code, errors = slurm.run(["scancel", "--signal=USR1", "--name=lasts"])
        assert code == 0, errors
        code, errors = program.end()
    assert code == 0, errors
    ends = re.findall(r"rank (.): left True, ([0-9]+) steps", said.read_text())
    assert sorted(rank for rank, _ in ends) == ["0", "1"]
    assert len({steps for _, steps in ends}) == 1


def test_a_job_that_is_queued_again_meets_in_the_next_epoch(
    slurm: SlurmCluster, told: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "place.py").write_text(_PLACE)
    script, said = tmp_path / "job.sh", tmp_path / "said"
    script.write_text(
        f"#!/bin/sh\n{sys.executable} {tmp_path}/place.py\n"  # not a rank: a group of one
        f"srun --overcommit -n2 {sys.executable} {tmp_path}/place.py\necho over\n"
        '[ -n "$SLURM_RESTART_COUNT" ] || exec sleep 1000\n'
    )
    submit = ["sbatch", "--parsable", "-N2", "--requeue", "--open-mode=append", f"--output={said}", script]
    code, job = slurm.run([*submit], told)
    assert code == 0, job
    job = job.strip()
    runs = lambda: said.read_text().count("over") if said.exists() else 0  # noqa: E731
    until(lambda: runs() == 1, patience=LONG)
    code, errors = slurm.run(["scontrol", "requeue", job])
    assert code == 0, errors
    until(lambda: "PENDING" in slurm.run(["scontrol", "show", "job", job])[1], patience=LONG)

    def runs_again() -> bool:
        slurm.start_now(job)
        return runs() == 2

    until(runs_again, lambda: slurm.run(["scontrol", "show", "job", job])[1], patience=LONG)
    found = re.findall(r"./. epoch .*", said.read_text())
    assert sorted(found[:3]) == [f"{place} epoch 0 restarts None" for place in ("0/1", "0/2", "1/2")]
    assert sorted(found[3:]) == ["0/1 epoch 0 restarts 1", "0/2 epoch 1 restarts 1", "1/2 epoch 1 restarts 1"]


def test_what_slurm_starts_is_gone_with_the_process_of_the_tests(tmp_path: Path) -> None:
    if reason := why_no_slurm():
        pytest.skip(reason)
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    program = (
        "import os, signal, time\nfrom pathlib import Path\nfrom shoal.testing import Network\n"
        "from tests.support.slurm_cluster import SlurmCluster\n"
        f"with Network('a') as network, SlurmCluster(network, Path({str(tmp_path)!r})) as slurm:\n"
        f"    with slurm.start(['srun', 'sh', '-c', 'echo > {tmp_path}/runs; sleep 1000; : {mark}']):\n"
        f"        while not os.path.exists({str(tmp_path / 'runs')!r}): time.sleep(0.01)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == -9, done.stderr

    def left() -> list[list[str]]:
        found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
        return [line for line in found if any(mark in word or str(tmp_path) in word for word in line)]

    until(lambda: not left(), left)
