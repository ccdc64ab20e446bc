"""Slurm's node lists, and the variables that a real one gave to jobs on several nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.rendezvous.launcher_variables import derived_port, read
from shoal.rendezvous.slurm_nodelist import counts_of, first_host, hosts_of

#: what each process found under Slurm 22.05 on the nodes n1, node01 and node02, by what started it
RECORDED: dict[str, list[dict[str, str]]] = json.loads(
    Path(__file__).with_name("slurm_environments.json").read_text()
)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login1", "login1"),
        ("login1,login2", "login1"),
        ("node[003-007,9]", "node003"),
        ("node[9,003-007],login1", "node9"),
        ("rack[1-2]n[05,07]", "rack1n05"),
        ("gpu-[1-4].cluster,x", "gpu-1.cluster"),
        (" a.b-c ", "a.b-c"),
    ],
)
def test_the_first_host_of_a_node_list_is_found(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "node[1-2", "node1-2]", ",a"])
def test_what_is_no_node_list_is_refused(nodelist: str) -> None:
    with pytest.raises(ValueError, match="not a Slurm node list"):
        first_host(nodelist)
    with pytest.raises(ValueError, match="not a Slurm node list"):
        hosts_of(nodelist)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login1", ["login1"]),
        ("node[098-101,7],login1", ["node098", "node099", "node100", "node101", "node7", "login1"]),
        ("rack[1-2]n[05,07]", ["rack1n05", "rack1n07", "rack2n05", "rack2n07"]),
        ("a[1-2].cluster,[8-9]x", ["a1.cluster", "a2.cluster", "8x", "9x"]),
        ("n[9-10]", ["n9", "n10"]),
    ],
)
def test_all_hosts_of_a_node_list_are_found_in_their_order(nodelist: str, hosts: list[str]) -> None:
    assert hosts_of(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist",
    [
        "a,",
        "a,,b",
        "n[2-1]",
        "n[]",
        "n[1-]",
        "n[x]",
        "n[[1]]",
        "-o",
        "a b",
        "a" * 256,
        "n[1-70000]",
    ],
)
def test_a_node_list_with_a_strange_part_is_refused(nodelist: str) -> None:
    with pytest.raises(ValueError, match="not a Slurm node list"):
        hosts_of(nodelist)


def test_a_node_list_of_too_many_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 65536 hosts"):
        hosts_of("n[1-60000]x[1-60000]")


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("16,8(x2)", [16, 8, 8])]
)
def test_counts_are_one_for_each_node(text: str, counts: list[int]) -> None:
    assert counts_of(text) == counts


@pytest.mark.parametrize("text", ["", "2(x", "x", "2,", "-1", "2(x99999)"])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of Slurm's counts"):
        counts_of(text)


@pytest.mark.parametrize(
    ("started", "size", "job", "host", "together"),
    [
        ("srun -N3 -n4", 4, "slurm-1.0", "n1", [0, 1, 0, 0]),
        ("srun -N2 -n2 --mpi=pmi2", 2, "slurm-2.0", "node01", [0, 0]),
        ("sbatch -N3: srun -N1 -n2 on the last node", 2, "slurm-3.0", None, [0, 1]),
        ("sbatch -N3: srun -N2 -n3 on the last two", 3, "slurm-3.1", "node01", [0, 1, 0]),
    ],
)
def test_ranks_that_slurm_started_meet_where_their_step_begins(
    started: str, size: int, job: str, host: str | None, together: list[int]
) -> None:
    launches = [launch for launch in map(read, RECORDED[started]) if launch is not None]
    assert [(launch.rank, launch.size) for launch in launches] == [(rank, size) for rank in range(size)]
    assert {(launch.launcher, launch.job, launch.epoch) for launch in launches} == {("Slurm", job, 0)}
    url = None if host is None else f"tcp://{host}:{derived_port(job)}"
    assert {launch.url for launch in launches} == {url}
    assert [launch.local_rank for launch in launches] == together
    assert {launch.local_size for launch in launches} == {None if host else size}


def test_a_script_that_slurm_started_is_no_rank() -> None:
    (script,) = RECORDED["sbatch -N3: the script"]
    assert read(script) is None
    launch = read({**script, "SLURM_RESTART_COUNT": "2", "SHOAL_STORE": "tcp://n1:29400"})
    assert launch is not None
    assert (launch.rank, launch.epoch) == (None, 0)
    again = read({**RECORDED["srun -N3 -n4"][1], "SLURM_RESTART_COUNT": "2"})
    assert again is not None
    assert (again.rank, again.epoch) == (1, 2)
