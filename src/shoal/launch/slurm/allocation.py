"""The Slurm allocation in which ``shoal run --srun`` runs: its hosts and their slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...errors import UsageError
from ...rendezvous.slurm_nodelist import counts_of, hosts_of
from ..remote.hosts import Host

T = TypeVar("T", int, str)

#: variables that configure the tasks of a step; they do not apply to a step with one agent per node
_TASK_VARIABLES = (
    "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_EXACT", "SLURM_EXCLUSIVE",
    "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_HINT", "SLURM_LABELIO", "SLURM_MEM_BIND",
    "SLURM_MULTI_PROG", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_TRES", "SLURM_STDERRMODE",
    "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_THREADS", "SLURM_TRES_BIND", "SLURM_TRES_PER_TASK",
)  # fmt: skip
#: the variables in ``_TASK_VARIABLES`` that scripts read to divide the cores and GPUs of a node
_FOR_RANKS = ("SLURM_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK")
#: variables that describe an agent as a task of its step; ranks must not inherit them
AGENT_TASK_VARIABLES = (
    "SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID",
)  # fmt: skip


@dataclass(frozen=True)
class Allocation:
    """A Slurm allocation.

    Attributes:
        hosts: its nodes, with the node names of Slurm, and their slots.
        restarts: how often Slurm has requeued the job.
        kept: variables that are passed to ranks but not to srun.
    """

    hosts: Sequence[Host]
    restarts: int
    kept: Mapping[str, str]


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Read the allocation from ``environ``.

    A node has a slot for each task of the job there.  If the number of tasks is not set, it has a slot for
    each of its CPUs, or for each group of ``--cpus-per-task`` CPUs.

    Raises:
        UsageError: there is no allocation, or it cannot be used.
    """
    if not environ.get("SLURM_JOB_ID"):
        raise UsageError(
            "--srun must run in a Slurm allocation, but SLURM_JOB_ID is not set: call it in an sbatch script "
            "or in a shell of salloc"
        )
    if _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        raise UsageError(
            "--srun starts a Slurm step itself, but this process is one of several tasks of a step: leave "
            "out the srun before shoal run"
        )
    names = _read(environ, "SLURM_JOB_NODELIST", hosts_of)
    if not names:
        raise UsageError("--srun: SLURM_JOB_NODELIST is not set: the nodes of this job are unknown")
    if len(set(names)) != len(names):
        raise UsageError("--srun: SLURM_JOB_NODELIST names a node twice")
    counts = _read(environ, "SLURM_TASKS_PER_NODE", counts_of)
    if len(counts) != len(names):  # in a step, the variable is about the step
        each = max(1, _number(environ, "SLURM_CPUS_PER_TASK", 1))
        counts = [cpus // each for cpus in _read(environ, "SLURM_JOB_CPUS_PER_NODE", counts_of)]
    if len(counts) != len(names) or not all(counts):
        raise UsageError(
            "--srun: neither SLURM_TASKS_PER_NODE nor SLURM_JOB_CPUS_PER_NODE has a number for each of the "
            f"{len(names)} nodes: request tasks by sbatch --ntasks-per-node=N"
        )
    first_slots = itertools.accumulate(counts, initial=0)
    hosts = [Host(*each) for each in zip(names, counts, first_slots, strict=False)]
    kept = {name: environ[name] for name in _FOR_RANKS if name in environ}
    return Allocation(hosts, _number(environ, "SLURM_RESTART_COUNT", 0), kept)


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without variables that change the meaning of the srun command line."""
    return {k: v for k, v in environ.items() if k not in _TASK_VARIABLES and not k.startswith("SRUN_")}


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"--srun: {name}={text[:80]!r}: expected a whole number from 0")
    return int(text)


def _read(environ: Mapping[str, str], name: str, parse: Callable[[str], list[T]]) -> list[T]:
    text = environ.get(name, "").strip()
    try:
        return parse(text) if text else []
    except ValueError as error:
        raise UsageError(f"--srun: {name}: {error}") from None
