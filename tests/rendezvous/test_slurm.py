"""Slurm's node lists."""

from __future__ import annotations

import pytest

from shoal.rendezvous.slurm import first_host


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
