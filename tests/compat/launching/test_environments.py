"""``init_process_group("shoal")`` reads the variables of launchers that torch does not know."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shoal
from shoal.compat import torch_store
from shoal.compat.launcher_store import (
    TorchLaunch,
    launch_from_environment,
    launcher_store,
    rendezvous_once,
    rendezvous_point,
)
from shoal.net import Deadline
from shoal.rendezvous import job_record, rendezvous_at
from shoal.store import MemoryStore, TCPStoreServer
from shoal.testing.processes import fork_server
from tests.support.launch_environments import (
    Environment,
    kubernetes,
    mpich,
    mpich_with_store,
    open_mpi,
    open_mpi_with_master,
    shoal_run,
    slurm,
)
from tests.support.ports import free_port
from tests.support.stage import FOREIGN, Stage
from tests.support.store_backend import StoreBackend

from .test_failures import SURVIVE


def slurm_on_two_hosts(rank: int, size: int, port: int) -> Environment:
    """As if on two hosts, which meet over loopback, where no secret is needed."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**slurm(rank, size, port), **master, "SLURM_STEP_NUM_NODES": "2"}


LAUNCHERS = [
    slurm,
    slurm_on_two_hosts,
    open_mpi,
    open_mpi_with_master,
    mpich,
    mpich_with_store,
    kubernetes,
    shoal_run,
]

#: the beginnings of names of variables by which launchers are recognised
NAMES = (*FOREIGN, "SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX")


@contextmanager
def environment(variables: Environment) -> Iterator[None]:
    """No variables of launchers but these."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(NAMES):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(NAMES):
            monkeypatch.delenv(name)


def use_it(rank: int) -> None:
    """What programs do with their default group, and its end."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    x = torch.full((1000,), float(rank + 1))
    dist.all_reduce(x)
    assert x.unique().tolist() == [3.0]
    for group in (
        dist.new_group([1, 0]),
        dist.new_group([0, 1], backend="gloo"),
        dist.new_group([0, 1], pg_options={"concurrency": 2}),
    ):
        y = torch.tensor([rank + 1.0])
        dist.all_reduce(y, group=group)
        assert y.item() == 3.0
    ranks: list[object] = [None, None]
    dist.all_gather_object(ranks, {"rank": rank})
    assert ranks == [{"rank": 0}, {"rank": 1}]
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert not torch_store._kept


def under_each_launcher(index: int, folder: str, ports: list[int]) -> None:
    torch.set_num_threads(1)
    os.environ["TMPDIR"] = folder
    for make, port in zip(LAUNCHERS, ports, strict=True):
        with environment({**make(index, 2, port), "TMPDIR": folder}):
            dist.init_process_group("shoal")
            use_it(index)
            # Again, and in other words.
            dist.init_process_group("cpu:shoal,cuda:gloo", init_method="env://", world_size=2)
            assert dist.get_backend_config() == "cpu:shoal,cuda:gloo"
            with shoal.init() as group:
                assert (group.rank, group.size) == (index, 2)
            use_it(index)


def test_ranks_meet_under_each_launcher(tmp_path: Path) -> None:
    fork_server()  # which has imported torch
    arguments = (str(tmp_path), [free_port() for _ in LAUNCHERS])
    mp.start_processes(under_each_launcher, arguments, nprocs=2, start_method="forkserver")
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {"secret"}  # which the jobs of this user share


def with_a_store_alone(index: int, url: str, job: str) -> None:
    torch.set_num_threads(1)
    with environment({"SHOAL_STORE": url, "SHOAL_SECRET": "of the test", "SHOAL_JOB": job}):
        dist.init_process_group("shoal")
        use_it(dist.get_rank())


def test_a_store_gives_out_ranks_in_order_of_arrival() -> None:
    fork_server()
    with TCPStoreServer(secret=b"of the test", records=job_record(2, "some job")).start() as server:
        mp.start_processes(with_a_store_alone, (server.url, "some job"), nprocs=2, start_method="forkserver")


def one_passes_wrong_options(index: int, folder: str) -> None:
    with environment({**mpich(index, 2, 0), "TMPDIR": folder}):
        options = {"transport": "pigeon"} if index else None
        expected = (shoal.UsageError, "pigeon") if index else (shoal.RendezvousError, "rank 1.*pigeon")
        with pytest.raises(expected[0], match=expected[1]):
            dist.init_process_group("shoal", pg_options=options, timeout=timedelta(seconds=60))
        assert not torch_store._kept
        dist.init_process_group("shoal")
        use_it(index)


def test_groups_below_a_default_group_of_another_backend_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 of such a group is not rank 0 of the job."""
    monkeypatch.setenv("SHOAL_JOB", "j")
    for partial, expected in ((False, "j"), (True, "j/3")):
        membership = rendezvous_at(rendezvous_point(MemoryStore(), 0, 1, "3", Deadline(60), partial=partial))
        assert (membership.job, membership.job_name) == ("shoal/3", expected)
        membership.release(1.0)


def test_a_rank_that_fails_after_the_meeting_tells_the_other_which_may_try_again(tmp_path: Path) -> None:
    fork_server()
    mp.start_processes(one_passes_wrong_options, (str(tmp_path),), nprocs=2, start_method="forkserver")


def one_makes_no_group(index: int, folder: str) -> None:
    with environment({**mpich(index, 2, 0), "TMPDIR": folder}):
        if index:
            launch = launch_from_environment({}, os.environ, ())
            assert launch is not None
            generator = rendezvous_once(launch, None)
            store, rank, size = next(generator)
            assert (rank, size) == (1, 2)
            generator.close()  # as when init_process_group ends
            with pytest.raises(dist.DistStoreError, match="closed"):
                store.get("key")
        else:
            with pytest.raises(shoal.RendezvousError, match="rank 1 created no group of shoal"):
                dist.init_process_group("shoal", timeout=timedelta(seconds=60))
        assert not torch_store._kept


def test_the_others_are_told_if_torch_makes_no_group_after_the_meeting(tmp_path: Path) -> None:
    fork_server()
    mp.start_processes(one_makes_no_group, (str(tmp_path),), nprocs=2, start_method="forkserver")


def test_a_killed_rank_0_is_named_though_it_served_the_store(stage: Stage) -> None:
    script = stage.script(SURVIVE.format(rank=0, end="os.kill(os.getpid(), signal.SIGKILL)"))
    killed, *survivors = stage.ranks(script, 3, slurm_on_two_hosts)
    assert killed.code == -signal.SIGKILL
    for survivor in survivors:
        assert (survivor.code, survivor.err) == (0, ""), survivor
        assert survivor.out.startswith("PeerLost (0,)"), survivor
    stage.assert_nothing_is_left()


def test_the_backend_below_torchs_is_that_of_the_variable(
    store_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_BACKEND", store_backend)
    dist.init_process_group("shoal")
    try:
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1.0] * 3
        for group in (dist.group.WORLD, dist.new_group([0])):
            assert type(group.group._backend).name == "store"
    finally:
        dist.destroy_process_group()


def test_a_backend_names_the_place_to_meet_if_nothing_else_does(
    store_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_BACKEND", store_backend)
    monkeypatch.setattr(StoreBackend, "default_url", "mpi://")
    on_two_hosts = {**open_mpi(1, 4, 0), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert launch_from_environment({}, on_two_hosts, ()) == TorchLaunch(None, None, "shoal", "mpi://")


def test_without_a_launcher_there_is_a_group_of_one() -> None:
    for arguments in ({}, {"world_size": 1}, {"rank": 0, "world_size": 1}):
        dist.init_process_group("shoal", **arguments)
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1.0] * 3
        dist.destroy_process_group()
        assert not torch_store._kept


def test_half_of_torchs_variables_are_no_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}):
        with pytest.raises(ValueError, match="MASTER_ADDR expected, but not set"):
            dist.init_process_group("shoal", **arguments)
    with pytest.raises(ValueError, match="WORLD_SIZE expected, but not set"):
        dist.init_process_group("shoal", rank=0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="RANK expected, but not set"):
        dist.init_process_group("shoal")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="RANK is set, but WORLD_SIZE is not"):
        dist.init_process_group("shoal")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun gives rank and size but not where the ranks meet"):
        dist.init_process_group("shoal")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {**slurm(0, 2, 0), "SLURM_PROCID": "first"},
            "Slurm set SLURM_PROCID='first': expected a whole",
        ),
        ({"SLURM_PROCID": "0"}, "looks like Slurm's, but SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not set"),
        ({"PMI_RANK": "0"}, "looks like MPICH's, but PMI_SIZE is not set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "looks like Open MPI's, but OMPI_COMM_WORLD_SIZE is not set"),
        (
            {**open_mpi(0, 4, 0), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            r"Open MPI gives rank and size but not where.*mpiexec -x SHOAL_STORE=tcp://FIRST-HOST",
        ),
        (
            {**slurm(0, 4, 0), "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "1"},
            r"Slurm: .* has no secret: .*openssl rand",
        ),
        ({"SHOAL_STORE": "tcp://127.0.0.1:1", "SHOAL_JOIN": "1"}, r"SHOAL_JOIN=1.*shoal\.elastic\.Session"),
    ],
)
def test_an_error_names_the_launcher_and_the_variable(
    variables: Environment, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=expected) as caught:
        dist.init_process_group("shoal")
    assert isinstance(caught.value, shoal.ConfigurationError)
    assert not dist.is_initialized()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mpich(0, 2, 0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(shoal.RendezvousTimeout, match="rank 1 did not come"):
        dist.init_process_group("shoal", timeout=timedelta(seconds=0.2))
    monkeypatch.setenv("SHOAL_TIMEOUT", "0.2")
    with pytest.raises(shoal.RendezvousTimeout, match=r"waited 0\.2 s .*rank 1 did not come"):
        dist.init_process_group("shoal")
    assert not torch_store._kept


@pytest.mark.parametrize("make", [*LAUNCHERS, lambda *_: {}])
def test_gloo_still_asks_for_torchs_variables(make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in make(0, 2, 0).items():
        monkeypatch.setenv(name, value)
    for backend in ("gloo", "cpu:gloo", None):
        with pytest.raises(
            ValueError, match="env:// rendezvous: environment variable RANK expected, but not set"
        ):
            dist.init_process_group(backend)
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        next(dist.rendezvous("env://"))  # by hand: no backend is known


def test_with_torchs_variables_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a job of another launcher, whose ranks would be two here."""
    for name, value in slurm(1, 2, 0).items():
        monkeypatch.setenv(name, value)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("shoal")
    store = dist.group.WORLD.get_group_store()
    assert launcher_store(store) is None
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore)
    assert store.port == int(place["MASTER_PORT"])
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    dist.destroy_process_group()
