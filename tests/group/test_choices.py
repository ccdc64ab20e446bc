"""What a group has of its own: lanes, timeout, connections, another backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal import ProcessGroup
from shoal.testing import no_leaks, run_threads

from .null_backend import null_group


def _sockets() -> int:
    """TCP connections of this process between its own ranks."""
    held = {_target(fd) for fd in os.listdir("/proc/self/fd")}
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return sum(f"socket:[{line.split()[9]}]" in held and line.split()[3] == "01" for line in lines)


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # another thread has closed it meanwhile
        return ""


def _make(group: ProcessGroup, how: str, **own: Any) -> ProcessGroup:
    if how == "subgroup":
        return group.subgroup([2, 0], **own)
    part = group.split(0, key=-group.rank, **own)
    assert part is not None
    return part


@pytest.mark.parametrize("how", ["split", "subgroup"])
def test_a_group_with_tcp_of_its_own_really_uses_sockets(how: str) -> None:
    def rank(group: ProcessGroup) -> tuple[int, float, tuple[int, ...]]:
        if how == "subgroup" and group.rank == 1:
            group.barrier().wait()
            return 1, 0.0, ()
        with _make(group, how, transport="tcp", timeout=30) as part:
            count = _sockets()
            x = torch.full((50_000,), float(part.rank + 1))
            part.all_reduce(x).wait()
            with part.split(0) as nested:
                nested.barrier().wait()
                assert nested._backend is part._backend is not group._backend
            assert part.timeout == 30.0
            group.barrier().wait() if how == "subgroup" else part.barrier().wait()
        return count, x[-1].item(), part.ranks

    with no_leaks():
        found = run_threads(rank, 3, timeout=60)
    members = [entry for entry in found if entry[2]]
    assert all(count > 0 for count, *_ in members)
    size = len(members)
    assert {(total, ranks) for _, total, ranks in members} == {
        (size * (size + 1) / 2, (2, 0) if how == "subgroup" else (2, 1, 0))
    }


def test_a_group_with_another_backend_outlives_the_world(store_backend: str) -> None:
    def rank(group: ProcessGroup) -> float:
        part = group.split(0, backend="store")
        assert part is not None
        group.close()
        with part:
            x = torch.ones(2)
            part.all_reduce(x).wait()
            part.barrier().wait()
        return x.sum().item()

    with no_leaks():
        assert run_threads(rank, 2, timeout=60) == [4.0, 4.0]


def test_a_native_group_in_a_world_of_another_backend(store_backend: str) -> None:
    def rank(group: ProcessGroup) -> float:
        with group.subgroup([1, 0], backend="native") as part:
            return part.all_reduce(torch.ones(100)).wait().sum().item()

    with no_leaks():
        assert run_threads(rank, 2, timeout=60, backend="store") == [200.0, 200.0]


def test_lanes_and_timeout_are_a_groups_own() -> None:
    group, _ = null_group()
    part = group.subgroup([1, 2], concurrency=3, timeout=5)
    backend: Any = group._backend
    assert [spec.tuning.concurrency for spec in backend.specs] == [1, 3]
    assert (part.timeout, part._backend) == (5.0, group._backend)
    nested = part.subgroup([0])
    assert (backend.specs[-1].tuning.concurrency, nested.timeout) == (3, 5.0)
    group.world.close(1.0)


def test_what_cannot_be_is_refused_before_anybody_waits() -> None:
    def rank(group: ProcessGroup) -> None:
        for own, words in (
            ({"concurrency": 0}, "expected a whole number from 1"),
            ({"backend": "pigeon"}, "unknown backend 'pigeon'"),
            ({"transport": "rope"}, "expected one of auto, shm, tcp"),
            ({"transprot": "tcp"}, r"did you mean 'transport'\?"),
        ):
            for make in (lambda own=own: group.subgroup([0], **own), lambda own=own: group.split(0, **own)):
                with pytest.raises(shoal.UsageError, match=words):
                    make()
        assert group.barrier().wait() is None

    run_threads(rank, 1, timeout=30)


def test_a_split_with_differing_values_is_refused_on_all_ranks_that_gave_them() -> None:
    def rank(group: ProcessGroup) -> str:
        own: dict[str, Any] = {"concurrency": 2} if group.rank == 1 else {}
        if group.rank == 2:
            with group.split(7) as part:
                return part.name[:5]
        with pytest.raises(shoal.UsageError) as refused:
            group.split(0, **own)
        return str(refused.value)

    zero, one, two = run_threads(rank, 3, timeout=40)
    for text in (zero, one):
        assert "color 0 asked for different groups: rank 0 gave nothing; rank 1 gave concurrency=2" in text
    assert two == "world"


@pytest.mark.parametrize("own", [{"concurrency": 2}, {"transport": "tcp"}], ids=str)
def test_members_of_a_subgroup_that_give_differing_values_are_told(own: dict[str, Any]) -> None:
    def rank(group: ProcessGroup) -> str:
        try:
            with group.subgroup([0, 1], timeout=50, **(own if group.rank else {})) as part:
                part.all_reduce(torch.ones(1)).wait()
        except (shoal.GroupAborted, shoal.UsageError) as told:
            return str(told)
        return "nothing"

    (name, value), *_ = own.items()
    for text in run_threads(rank, 2, timeout=60):
        assert "rank 0 gave [0, 1]" in text
        assert f"rank 1 gave [0, 1] with {name}={value!r}" in text


@pytest.mark.parametrize("collective", [True, False])
def test_members_that_give_differing_scopes_are_told(collective: bool) -> None:
    def rank(group: ProcessGroup) -> str:
        with group.subgroup([0, 1], timeout=50, scope=[None, "pair"][group.rank]) as part:
            reduces = collective and group.rank == 0
            future = part.all_reduce(torch.ones(1)) if reduces else part.recv(None, 1 - group.rank)
            with pytest.raises(shoal.GroupAborted) as told:
                future.wait()
            return str(told.value)

    for text in run_threads(rank, 2, timeout=60):
        assert "rank 0 gave [0, 1]" in text
        assert "rank 1 gave [0, 1] with scope='pair'" in text
