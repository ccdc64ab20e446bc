"""The default group's beginning and end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import shoal
import shoal.distributed as dist
from shoal.distributed.backend import parse_backend
from shoal.group import ProcessGroup
from shoal.testing import no_leaks, processes
from tests.support.ports import free_port

from .pool import Pool, begin

SIZE = 4


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A default group of one in this process."""
    dist.init_process_group(init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_a_default_group_the_error_says_what_to_call() -> None:
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    assert dist.GroupMember.WORLD is None
    x = torch.ones(1)
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(x),
        "get_rank": dist.get_rank,
        "get_world_size": dist.get_world_size,
        "get_backend": dist.get_backend,
        "new_group": dist.new_group,
        "isend": lambda: dist.isend(x, 0),
        "P2POp": lambda: dist.P2POp(dist.isend, x, 0),
        "all_gather_object": lambda: dist.all_gather_object([], 1),
        "destroy_process_group": dist.destroy_process_group,
    }.items():
        with pytest.raises(shoal.UsageError, match=rf"^{name}: .*init_process_group\(\) first"):
            call()


def test_a_second_default_group_is_refused_until_the_first_is_destroyed(alone: None, tmp_path: Path) -> None:
    assert dist.is_initialized()
    assert dist.group.WORLD is dist.GroupMember.WORLD
    with pytest.raises(
        shoal.UsageError, match="init_process_group on rank 0: a default group exists already"
    ):
        dist.init_process_group()
    dist.destroy_process_group(dist.group.WORLD)
    assert not dist.is_initialized()
    assert dist.get_pg_count() == 0
    dist.init_process_group("cpu:shoal", f"file://{tmp_path}/second?rank=0&world_size=1", 30.0)
    assert dist.get_backend() == dist.Backend.SHOAL
    assert dist.get_backend_config() == "cpu:shoal"
    assert dist.group.WORLD.timeout == 30.0


def test_two_threads_do_not_both_make_the_default_group(tmp_path: Path) -> None:
    refusals: list[shoal.UsageError] = []
    place = f"file://{tmp_path}/threads"

    def try_it() -> None:
        try:
            dist.init_process_group(init_method=place, rank=0, world_size=1)
        except shoal.UsageError as error:
            refusals.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refusals) == 3
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


def test_a_failed_beginning_leaves_nothing_behind(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/failed"
    with no_leaks():
        with pytest.raises(shoal.RendezvousTimeout):
            dist.init_process_group(
                init_method=place, rank=0, world_size=2, timeout=timedelta(milliseconds=50)
            )
        assert not dist.is_initialized()
        dist.init_process_group(init_method=f"{place}.again", rank=0, world_size=1)
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": "ucc"}, shoal.UnsupportedOperation, "needs the UCC library and is not supported"),
        ({"backend": "cpu:gloo,cuda:gloo"}, shoal.UnsupportedOperation, "no such backends for these devices"),
        ({"backend": "cpu:gloo,cpu:mpi"}, shoal.UnsupportedOperation, "no such backends for these devices"),
        ({"backend": "cpu:mpi,cuda:nccl"}, shoal.UnsupportedOperation, "no such backends for these devices"),
        ({"backend": "glue"}, shoal.UsageError, "unknown; expected one of gloo, mpi, native, nccl, shoal"),
        ({"backend": 3}, shoal.UsageError, "expected a str"),
        ({"device_id": 0}, shoal.UnsupportedOperation, "omit device_id"),
        ({"timeout": "long"}, shoal.UsageError, "expected a timedelta or a number of seconds"),
        ({"pg_options": 3}, shoal.UsageError, "expected a dict of arguments of shoal.init"),
        (
            {"store": dist.HashStore(), "init_method": "env://"},
            shoal.UsageError,
            "pass either init_method='env://' or store=, not both",
        ),
        ({"store": dist.HashStore(), "rank": 0}, shoal.UsageError, "store= requires rank and world_size"),
        ({"init_method": "carrier://pigeon"}, shoal.UsageError, "registered for carrier://"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused(
    arguments: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        dist.init_process_group(**arguments)
    assert not dist.is_initialized()


def test_backends_answer_to_torchs_names() -> None:
    assert [dist.Backend("GLOO"), dist.Backend.NCCL] == ["gloo", "nccl"]
    names = ("gloo", "shoal", "cpu:gloo", "native", "mpi", "xpu:xccl", "cuda:gloo", "pigeon")
    assert [dist.is_backend_available(name) for name in names] == [True] * 5 + [False] * 3
    for name in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"):
        assert dist.is_backend_available(name) == dist.is_nccl_available()
        assert parse_backend(name).backend == "nccl"
    assert parse_backend("cpu:tcp,cuda:nccl").transport == "tcp"
    for name in ("cpu:nccl", "cpu:nccl,cuda:nccl"):
        with pytest.raises(shoal.UnsupportedOperation, match=f"backend='{name}': .*use .*for CUDA \"nccl\""):
            parse_backend(name)
    assert dist.get_default_backend_for_device("cuda") == "nccl"
    assert dist.is_available()
    assert dist.is_gloo_available()
    others = (dist.is_ucc_available, dist.is_xccl_available)
    assert not any(available() for available in others)
    assert dist.is_mpi_available() == (find_spec("mpi4py") is not None)
    assert dist.get_default_backend_for_device("cpu") == "shoal"
    with pytest.raises(shoal.UnsupportedOperation):
        dist.get_default_backend_for_device("xpu")


@pytest.mark.parametrize(("name", "engine"), [(None, "store"), ("shoal", "store"), ("gloo", "native")])
def test_the_default_backend_is_that_of_the_variable(
    name: str | None, engine: str, store_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_BACKEND", store_backend)
    dist.init_process_group(name, f"file://{tmp_path}/default", rank=0, world_size=1)
    try:
        assert dist.get_backend() == (name or "shoal")
        for group in (dist.group.WORLD, dist.new_group([0], backend=name)):
            assert type(group._backend).name == engine
    finally:
        dist.destroy_process_group()


def test_the_local_rank_is_the_launchers(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.get_node_local_rank() == 0
    dist.destroy_process_group()
    assert dist.get_node_local_rank(5) == 5
    with pytest.raises(shoal.UsageError, match="or pass fallback_rank"):
        dist.get_node_local_rank()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank(5) == 3
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert dist.is_torchelastic_launched()


def _again_and_again(meeting: str) -> None:
    for i in range(5):
        x = torch.ones(1)
        begin(dist.get_rank(), SIZE, meeting)
        dist.new_group([0, 1])
        dist.all_reduce(x)
        assert x.item() == SIZE, i


def test_default_groups_follow_each_other_at_one_place(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(_again_and_again, str(tmp_path / "again"))


def _as_scripts_do(port: int) -> object:
    """What torch's tutorials do: MASTER_ADDR and MASTER_PORT in the environment, the rest as arguments."""
    rank, found = dist.get_rank(), []
    launcher = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("SHOAL_")}
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    try:
        for _ in range(3):
            dist.destroy_process_group()
            dist.init_process_group("gloo", rank=rank, world_size=SIZE, timeout=timedelta(seconds=20))
            x = torch.ones(1)
            dist.all_reduce(x)
            found.append((dist.get_rank(), dist.get_world_size(), x.item()))
    finally:
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        os.environ.update(launcher)
    return found


def test_the_environment_of_torchs_tutorials_is_enough(ranks: Pool) -> None:
    assert ranks.run(_as_scripts_do, free_port()) == [[(rank, SIZE, 4.0)] * 3 for rank in range(SIZE)]


def _in_a_store(port: int, path: str) -> list[object]:
    rank, found = dist.get_rank(), []
    network = dist.TCPStore("localhost", port, SIZE, rank == 0)
    with network, dist.FileStore(path) as file:
        for store in (network, dist.PrefixStore("p", file)):
            dist.destroy_process_group()
            dist.init_process_group(store=store, rank=rank, world_size=SIZE, timeout=20)
            x = torch.ones(1)
            dist.all_reduce(x)
            found.append(x.item())
            store.add("left", 1)
        begin(rank, SIZE, f"{path}.after")  # the stores must outlive the groups that met in them
        dist.barrier()
    return found


def test_ranks_meet_in_a_store_of_the_scripts_own(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(_in_a_store, free_port(), str(tmp_path / "store")) == [[SIZE, SIZE]] * SIZE


def _leave_a_peer_that_hangs(group: ProcessGroup, meeting: str) -> None:
    group.barrier().wait()  # both are there: the time that they have is short
    dist.init_process_group("gloo", f"file://{meeting}", 3.0, group.size, group.rank)
    dist.barrier()
    group.store.set(f"ready/{group.rank}", b"")
    if group.rank == 1:
        group.store.wait(["never"])
    group.store.wait(["stopped"])
    dist.isend(torch.ones(10**6), 1)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    group.store.set("left", b"")


def test_destroying_does_not_hang_on_a_peer_that_does(tmp_path: Path) -> None:
    with processes(_leave_a_peer_that_hangs, 2, str(tmp_path / "meeting")) as ranks:
        ranks.store.wait(["ready/0", "ready/1"])
        ranks.stop(1)
        ranks.store.set("stopped", b"")
        ranks.store.wait(["left"])
