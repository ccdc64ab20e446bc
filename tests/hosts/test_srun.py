"""``shoal run --srun`` under a real Slurm, on two nodes."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import shoal
from tests.launch.conftest import PRELUDE
from tests.support.machines import LONG, Program
from tests.support.slurm_cluster import SlurmCluster, slurm
from tests.support.waiting import until

__all__ = ["slurm"]

SOURCE = Path(shoal.__file__).parent.parent

_SUMS = """
import os, shoal, sys, torch
with shoal.init(timeout=60) as group:
    x = torch.tensor([float(group.rank + 1)])
    group.all_reduce(x).wait()
    print(f"rank {group.rank} of {group.size} on {os.environ['SLURMD_NODENAME']}: {x.item():g}", flush=True)
    group.barrier().wait()
    if group.rank == 3:
        os._exit(int(sys.argv[1]))
    group.all_reduce(torch.ones(1)).wait(60)
"""

# What the launcher has written is known to have started.
_LASTS = """
print("runs", flush=True)
"""

_ELASTIC = """
import shoal, torch
from shoal import elastic
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
x = torch.ones(64, 4)
with elastic.Session(elastic.State(model=net, samples=elastic.Samples(64, batch=12)), min_size=1) as session:
    model = session.parallel(net)
    for step in session.steps():
        with step:
            (model(x[step.indices]).square().mean() * step.weight).backward()
            step.commit()
            net.zero_grad()
        if step.number == 3:
            tell(f"trains-{rank}")
    tell(f"left-{rank}", session.left)
"""


class Jobs:
    """Runs launchers in allocations of two nodes, with two tasks each by default, on scripts in a folder."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self._environment = {
            "PYTHONPATH": str(SOURCE),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "TEST_MARK": self.mark,
        }

    @property
    def mark(self) -> str:
        return str(self.folder)

    def write(self, script: str, *, prelude: str = PRELUDE) -> None:
        (self.folder / "script.py").write_text(prelude + textwrap.dedent(script))

    def launcher(self, *options: str, arguments: str = "") -> str:
        """What a shell executes."""
        words = [sys.executable, "-m", "shoal", "run", "--srun", *options, "script.py"]
        return f"cd {self.folder} && exec {shlex.join(words)} {arguments}"

    @contextmanager
    def start(self, *options: str, arguments: str = "", before: str = "") -> Iterator[Program]:
        """A launcher outside of the nodes, where salloc is called."""
        allocate = ["salloc", "--quiet", "-N2", "--ntasks-per-node=2"]
        command = [*allocate, "sh", "-c", before + self.launcher(*options, arguments=arguments)]
        with self.slurm.start(command, self._environment) as program:
            yield program

    def run(self, *options: str, arguments: str = "") -> tuple[int, str]:
        with self.start(*options, arguments=arguments) as program:
            return program.end()

    def submit(self, *options: str, tasks: int = 2) -> str:
        """A launcher in a batch script, with so many tasks on each node; the job's number."""
        script = self.folder / "job.sh"
        script.write_text(f"#!/bin/sh\n{self.launcher(*options)}\n")
        command = ["sbatch", "--parsable", "-N2", f"--ntasks-per-node={tasks}", "--requeue"]
        output = ["--open-mode=append", f"--output={self.folder}/said"]
        code, said = self.slurm.run([*command, *output, script], self._environment)
        assert code == 0, said
        return said.strip()

    def tell(self, *command: str) -> None:
        code, said = self.slurm.run(command)
        assert code == 0, said

    def told(self, *names: str) -> list[str]:
        """What ranks have told; their numbers of processes are those of the namespace of all programs."""
        files = [self.folder / name for name in names]
        until(lambda: all(file.exists() for file in files), self.said, patience=LONG)
        return [file.read_text() for file in files]

    def await_all(self) -> None:
        """Wait until the launcher, which has ``--log-dir logs``, has heard all ranks."""
        files = [self.folder / "logs" / f"rank{rank}.log" for rank in range(4)]
        until(lambda: all(file.exists() and file.read_text() for file in files), patience=LONG)

    def said(self) -> str:
        file = self.folder / "said"
        return file.read_text() if file.exists() else ""

    def state(self, job: str) -> str:
        """RUNNING, COMPLETED 0:0, or the like."""
        _, said = self.slurm.run(["scontrol", "show", "job", job])
        found = re.search(r"JobState=(\w+)", said)
        code = re.search(r"ExitCode=([0-9:]+)", said)
        return f"{found and found[1]} {code and code[1]}"

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those of the launcher, of agents and of ranks whose command lines have these words."""
        found = []
        for process in psutil.process_iter():
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                line = process.cmdline()
                if f"TEST_MARK={self.mark}".encode() not in environ or not line:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE and all(word in line for word in words):
                    found.append(process)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def await_end(self) -> None:
        """Wait until nothing is left, for Slurm neither."""
        until(lambda: not self.processes(), self.processes, patience=LONG)
        until(lambda: self.slurm.states() == ["idle", "idle"], self.slurm.states, patience=LONG)


@pytest.fixture
def jobs(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Jobs]:
    found = Jobs(slurm, tmp_path)
    yield found
    slurm.run(["scancel", "--user=root"])
    found.await_end()


def test_ranks_on_both_nodes_sum_up_and_the_one_that_fails_is_named_with_its_node(jobs: Jobs) -> None:
    jobs.write(_SUMS, prelude="")
    code, said = jobs.run(arguments="7")
    assert code == 7, said
    expected = [f"[{rank}] rank {rank} of 4 on {'aabb'[rank]}: 10" for rank in range(4)]
    assert sorted(re.findall(r"^\[\d\] rank .*", said, re.M)) == expected
    assert "shoal: rank 3 on b failed first: exit code 7, after " in said


@pytest.mark.parametrize("who", ["head", "srun", "agent"])
def test_nothing_is_left_when_it_is_killed(jobs: Jobs, who: str) -> None:
    jobs.write(_LASTS + "await_signal()")
    with jobs.start("--log-dir", "logs") as program:
        jobs.await_all()
        words = {"head": ("run", "--srun"), "srun": ("--kill-on-bad-exit=0",), "agent": ("--connect",)}[who]
        chosen = [each for each in jobs.processes(*words) if who != "agent" or "srun" not in each.name()]
        chosen[0].send_signal(signal.SIGKILL)
        code, said = program.end()
    jobs.await_end()
    assert who == "head" or code == 74, said  # salloc makes 0 of a signal
    if who == "srun":
        assert "srun ended with exit code 137" in said
    if who == "agent":
        assert re.search("shoal: host [ab] is lost, and with it ranks [02], [13]: ", said)


def test_the_others_go_on_with_min_when_an_agent_is_killed(jobs: Jobs) -> None:
    jobs.write(_LASTS + "await_file('go') if rank < 2 else await_signal()")
    with jobs.start("--min", "2", "--log-dir", "logs") as program:
        jobs.await_all()
        agents = [each for each in jobs.processes("--connect") if "srun" not in each.name()]
        on_b = [each for each in agents if each.environ()["SLURMD_NODENAME"] == "b"]
        on_b[0].send_signal(signal.SIGKILL)
        until(lambda: len(jobs.processes("script.py")) == 3, jobs.processes)  # the launcher and two ranks
        (jobs.folder / "go").touch()
        code, said = program.end()
    assert code == 0, said
    assert "shoal: host b is lost, and with it ranks 2, 3: " in said
    assert "shoal: 2 of 4 ranks finished; ranks 2, 3 were lost with the host" in said


def test_a_failing_srun_is_heard(jobs: Jobs) -> None:
    jobs.write("print('it runs')")
    # A node that the job has not.
    with jobs.start(before="export SLURM_JOB_NODELIST=a,z; ") as program:
        code, said = program.end()
    assert code == 1
    assert "shoal: hosts a, z: srun ended with exit code 1 before an agent had connected from there" in said
    assert re.search(r"^  \| srun: error: ", said, re.M)
    assert "it runs" not in said


@pytest.mark.parametrize("to", ["the steps", "the batch script"])
def test_sigusr1_reaches_each_rank_once(jobs: Jobs, to: str) -> None:
    jobs.write(
        """
        def heard(number, frame):
            global count
            count += 1
            tell(f"heard-{rank}", count)
        count = 0
        signal.signal(signal.SIGUSR1, heard)
        tell(f"pid-{rank}", os.getpid())
        await_file("go")
        """
    )
    job = jobs.submit()
    jobs.told(*(f"pid-{rank}" for rank in range(4)))
    jobs.tell("scancel", "--signal=USR1", *(["--batch"] if to == "the batch script" else []), job)
    jobs.told(*(f"heard-{rank}" for rank in range(4)))
    (jobs.folder / "go").touch()
    until(lambda: jobs.state(job) == "COMPLETED 0:0", lambda: jobs.state(job) + jobs.said(), patience=LONG)
    assert jobs.told(*(f"heard-{rank}" for rank in range(4))) == ["1"] * 4


def test_scancel_ends_a_session_after_its_step_and_leaves_nothing(jobs: Jobs) -> None:
    jobs.write(_ELASTIC)
    job = jobs.submit(tasks=1)
    jobs.told("trains-0", "trains-1")
    jobs.tell("scancel", job)
    # A rank that is told twice ends at once.
    assert jobs.told("left-0", "left-1") == ["True"] * 2
    jobs.await_end()


def test_a_job_that_is_queued_again_is_another_epoch(jobs: Jobs) -> None:
    jobs.write(
        """
        epoch = os.environ["SHOAL_EPOCH"]
        tell(f"epoch-{epoch}-{rank}")
        if epoch == "0":
            await_signal()
        """
    )
    job = jobs.submit()
    jobs.told(*(f"epoch-0-{rank}" for rank in range(4)))
    jobs.tell("scontrol", "requeue", job)
    until(lambda: "PENDING" in jobs.state(job), lambda: jobs.state(job), patience=LONG)
    files = [jobs.folder / f"epoch-1-{rank}" for rank in range(4)]

    def runs_again() -> bool:
        jobs.slurm.start_now(job)
        return all(file.exists() for file in files)

    until(runs_again, lambda: jobs.slurm.run(["scontrol", "show", "job", job])[1], patience=LONG)
    until(lambda: jobs.state(job) == "COMPLETED 0:0", lambda: jobs.state(job), patience=LONG)
