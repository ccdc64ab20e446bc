"""What ``shoal run --srun`` reads of the allocation in which it runs."""

from __future__ import annotations

from typing import Final

import pytest

from shoal.errors import UsageError
from shoal.launch.slurm.allocation import allocation, for_srun

#: what a batch script found under Slurm 22.05: sbatch -N2 --ntasks-per-node=2
BATCH: Final = {
    "SLURMD_NODENAME": "a",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


def places(environ: dict[str, str]) -> list[tuple[str, int, int]]:
    return [(host.name, host.slots, host.first) for host in allocation(environ).hosts]


def test_a_node_takes_as_many_ranks_as_the_job_has_tasks_there() -> None:
    assert places(BATCH) == [("a", 2, 0), ("b", 2, 2)]
    uneven = {**BATCH, "SLURM_JOB_NODELIST": "n[09-11]", "SLURM_TASKS_PER_NODE": "4,1(x2)"}
    assert places(uneven) == [("n09", 4, 0), ("n10", 1, 4), ("n11", 1, 5)]


def test_where_no_tasks_are_told_a_node_takes_one_for_each_of_its_cpus_or_of_a_task() -> None:
    environ = {k: v for k, v in BATCH.items() if k != "SLURM_TASKS_PER_NODE"}
    environ["SLURM_JOB_CPUS_PER_NODE"] = "16,8"
    assert places(environ) == [("a", 16, 0), ("b", 8, 16)]
    assert places({**environ, "SLURM_CPUS_PER_TASK": "4"}) == [("a", 4, 0), ("b", 2, 4)]


def test_in_the_shell_of_a_step_the_tasks_of_that_step_do_not_count() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert places({**BATCH, **step}) == [("a", 2, 0), ("b", 2, 2)]


def test_how_often_the_job_was_queued_again_is_told() -> None:
    assert allocation(BATCH).restarts == 0
    assert allocation({**BATCH, "SLURM_RESTART_COUNT": "3"}).restarts == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set: call it in an sbatch script"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "one of several tasks of a step: leave out the srun"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_JOB_NODELIST": "a,-oX"}, "SLURM_JOB_NODELIST: not a Slurm node list: 'a,-oX'"),
        ({"SLURM_JOB_NODELIST": "a,a"}, "names a node twice"),
        ({"SLURM_TASKS_PER_NODE": "2(y2)"}, "SLURM_TASKS_PER_NODE: not a list of Slurm's counts"),
        ({"SLURM_TASKS_PER_NODE": "", "SLURM_JOB_CPUS_PER_NODE": ""}, "sbatch --ntasks-per-node=N"),
        ({"SLURM_TASKS_PER_NODE": "2,0"}, "sbatch --ntasks-per-node=N"),
        ({"SLURM_RESTART_COUNT": "-1"}, "SLURM_RESTART_COUNT='-1': expected a whole number"),
    ],
)
def test_what_is_no_allocation_is_refused_in_words(changes: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match="--srun") as caught:
        allocation({**BATCH, **changes})
    assert words in str(caught.value)


def test_srun_finds_nothing_that_would_change_what_its_command_line_says() -> None:
    environ = {
        **BATCH,
        "SLURM_CPUS_PER_TASK": "4",
        "SRUN_CPUS_PER_TASK": "4",
        "SLURM_MULTI_PROG": "1",
        "X": "1",
    }
    found = for_srun(environ)
    gone = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"}
    gone |= {"SRUN_CPUS_PER_TASK", "SLURM_MULTI_PROG"}
    assert found == {k: v for k, v in environ.items() if k not in gone}
    assert allocation(environ).kept == {"SLURM_CPUS_PER_TASK": "4"}  # what ranks find again
