"""Launch environments: what each launcher sets, read, and met by."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shoal import ConfigurationError, RendezvousError, RendezvousTimeout
from shoal.rendezvous import schemes
from shoal.rendezvous.launcher_variables import derived_port, job_name, read, read_mpi
from tests.support.launch_environments import (
    ALL,
    Environment,
    Maker,
    by_hand,
    kubernetes,
    mpich,
    open_mpi,
    shoal_run,
    slurm,
    torchrun,
)
from tests.support.ports import free_port

from .together import all_well, release_all, rendezvous_at, together, unknown_host


@pytest.fixture(autouse=True)
def private_files_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("environment", ALL)
def test_ranks_meet_in_the_environment_of(environment: Maker, private_files_in: Path) -> None:
    port = free_port()
    for size in (3, 1, 2):  # one group after another, as in one program
        calls = [
            lambda rank=rank, size=size: rendezvous_at("env://", environ=environment(rank, size, port))
            for rank in range(size)
        ]
        members = all_well(together(*calls))
        assert [(member.rank, member.size) for member in members] == [(r, size) for r in range(size)]
        assert [(member.local_rank, member.local_size) for member in members] == [
            (r, size) for r in range(size)
        ]
        members[0].store.set("x", b"1")
        assert members[-1].store.get("x") == b"1"
        release_all(members)
    left = {path.name for path in private_files_in.rglob("*") if path.is_file()}
    assert left <= {"secret"}  # which the jobs of this user share


@pytest.mark.parametrize("environment", ALL)
def test_a_variable_that_is_no_number_is_named(environment: Maker) -> None:
    good = environment(0, 2, 1)
    name = next(name for name in good if name.endswith(("RANK", "PROCID", "INDEX")))
    with pytest.raises(ConfigurationError, match=rf"{name}.*expected a whole number from 0"):
        read({**good, name: "zero"})


@pytest.mark.parametrize("environment", ALL)
def test_a_rank_beyond_the_size_is_refused(environment: Maker) -> None:
    with pytest.raises(ConfigurationError, match="rank 2 in a job of size 2; ranks go from 0 to 1"):
        read(environment(2, 2, 1))


@pytest.mark.parametrize("environment", [torchrun, slurm, open_mpi, mpich])
def test_ranks_on_one_host_agree_on_a_secret(environment: Maker) -> None:
    calls = [lambda r=r: rendezvous_at("env://", environ=environment(r, 2, 1)) for r in range(2)]
    members = all_well(together(*calls))
    assert members[0].secret == members[1].secret != b""
    release_all(members)


def test_without_a_launcher_there_is_a_group_of_one() -> None:
    batch_script = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    member = rendezvous_at("env://", environ={"PATH": "/bin", **batch_script})
    assert (member.rank, member.size, member.local_rank, member.local_size) == (0, 1, 0, 1)
    assert member.secret == b""
    member.store.set("x", b"1")
    member.release(1.0)


def test_a_size_without_a_launcher_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"the environment has no variables of a launcher.*shoal run"
    ):
        rendezvous_at("env://", 0, 2)


def test_job_and_epoch_come_from_the_launcher() -> None:
    found = {environment.__name__: read(environment(0, 2, 1)) for environment in ALL}
    assert {name: (launch.job, launch.epoch) for name, launch in found.items() if launch} == {
        "shoal_run": ("some job", 7),
        "by_hand": ("default", 0),
        "torchrun": ("default", 2),
        "slurm": ("slurm-4711.0", 0),
        "open_mpi": ("mpi-prterun-node-4711@1", 0),
        "mpich": ("default", 0),
        "open_mpi_with_master": ("mpi-prterun-node-4711@1", 0),
        "mpich_with_store": ("default", 0),
        "kubernetes": ("default", 0),
    }


def test_the_name_of_the_job_needs_no_other_variables() -> None:
    for environment in ALL:
        launch = read(environment(0, 2, 1))
        assert launch is not None
        assert job_name(environment(0, 2, 1)) == launch.job
    for environ in ({}, {"RANK": "0"}, {"SHOAL_RANK": "x"}):
        assert job_name(environ) == "default"
        assert job_name({**environ, "SHOAL_JOB": "j"}) == "j"


def test_shoals_variables_go_before_those_of_another_launcher() -> None:
    launch = read({**slurm(1, 2, 1), "SHOAL_STORE": "file:///x", "SHOAL_JOB": "j", "SHOAL_EPOCH": "3"})
    assert launch is not None
    assert (launch.rank, launch.url, launch.job, launch.epoch) == (1, "file:///x", "j", 3)
    launch = read({**slurm(1, 2, 1), **shoal_run(0, 4, 1)})
    assert launch is not None
    assert (launch.rank, launch.size) == (0, 4)


def test_the_innermost_launcher_counts() -> None:
    helper = slurm(0, 2, 1)  # mpirun starts one helper on each host through srun
    for inner in (open_mpi, mpich, torchrun):
        launch = read({**helper, **inner(3, 4, 1)})
        assert launch is not None
        assert (launch.rank, launch.size) == (3, 4)
    launch = read({**slurm(1, 2, 1), "PMI_RANK": "1", "PMI_SIZE": "2"})  # srun --mpi=pmi2
    assert launch is not None
    assert launch.launcher == "Slurm"


def test_the_number_of_a_pod_is_its_rank_only_where_a_group_has_a_size() -> None:
    swept = {"JOB_COMPLETION_INDEX": "3"}  # one of many independent runs
    assert read(swept) is None
    assert read({**swept, "SHOAL_SIZE": "1"}) is not None
    for others_disconnected in (swept, {**swept, "SHOAL_SIZE": "1"}):
        member = rendezvous_at("env://", environ=others_disconnected)
        assert (member.rank, member.size) == (0, 1)
        member.release(1.0)
    launch = read({**swept, "SHOAL_STORE": "tcp://127.0.0.1:29400"})
    assert launch is not None
    assert (launch.rank, launch.size) == (None, None)  # in order of arrival
    with pytest.raises(ConfigurationError, match="Kubernetes gives rank and size but not where"):
        read({**swept, "SHOAL_SIZE": "4"})
    with pytest.raises(ConfigurationError, match="Kubernetes gives this process rank 3 in a job of size 2"):
        read(kubernetes(3, 2, 1))


@pytest.mark.parametrize("inner", [shoal_run, torchrun, open_mpi, mpich, slurm])
def test_a_launcher_within_a_pod_goes_before_the_pod(inner: Maker) -> None:
    launch = read({**kubernetes(1, 2, 1), **inner(3, 8, 1)})
    assert launch is not None
    assert (launch.rank, launch.size) == (3, 8)


def test_a_rank_waits_for_the_name_of_a_pod_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[str] = []

    def look_up(host: str, port: int) -> list[str]:
        if host == "train-0.train" and len(known) < 3:
            known.append(host)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    monkeypatch.setattr(schemes, "resolve", look_up)
    monkeypatch.setattr(schemes, "_NAME_RETRY_INTERVAL_S", 0.001)
    monkeypatch.setattr(schemes, "means_loopback", lambda host: True)
    environ = {**kubernetes(0, 1, 1), "SHOAL_SIZE": "2", "SHOAL_SECRET": "x"}
    environ["SHOAL_STORE"] = f"tcp://train-0.train:{free_port()}"
    calls = [
        lambda r=r: rendezvous_at("env://", environ={**environ, "JOB_COMPLETION_INDEX": str(r)})
        for r in range(2)
    ]
    members = all_well(together(*calls))
    assert sorted(member.rank for member in members) == [0, 1]
    assert len(known) == 3
    release_all(members)


def test_a_name_that_nobody_knows_is_an_error_at_once_and_in_kubernetes_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schemes, "resolve", unknown_host)
    unknown = {**kubernetes(1, 2, 1), "SHOAL_STORE": "tcp://train-0.invalid:29400"}
    with pytest.raises(RendezvousTimeout, match=r"'train-0.invalid', has been unknown.*headless Service"):
        rendezvous_at("env://", environ=unknown, timeout=0.2)
    del unknown["KUBERNETES_SERVICE_HOST"]
    with pytest.raises(RendezvousError, match=r"host 'train-0.invalid' of the store is unknown") as caught:
        rendezvous_at("env://", environ=unknown, timeout=0.2)
    assert not isinstance(caught.value, RendezvousTimeout)


def test_slurm_on_several_hosts_meets_on_the_first() -> None:
    nodes = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[003-004]"}
    launch = read({**slurm(1, 4, 1), **nodes})
    assert launch is not None
    assert launch.url == f"tcp://node003:{derived_port('slurm-4711.0')}"
    assert launch.local_size is None
    assert launch.local_rank == 1


def test_torchrun_on_several_hosts_keeps_off_the_agents_port() -> None:
    launch = read({**torchrun(1, 4, 29500), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"})
    assert launch is not None
    url = urlsplit(launch.url or "")
    assert url.hostname == "10.0.0.1"
    assert url.port != 29500
    assert 20000 <= (url.port or 0) < 30000


@pytest.mark.parametrize(
    "environ",
    [
        {**open_mpi(0, 4, 1), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {**mpich(0, 4, 1), "MPI_LOCALNRANKS": "2"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"SHOAL_RANK": "0", "SHOAL_SIZE": "2"},
    ],
)
def test_ranks_that_have_no_place_to_meet_are_told_how_to_name_one(environ: Environment) -> None:
    with pytest.raises(ConfigurationError, match="not where the ranks meet: set SHOAL_STORE"):
        read(environ)


def test_launchers_of_mpi_are_read_without_a_place_to_meet() -> None:
    several_hosts = {**open_mpi(1, 4, 1), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigurationError, match=r"; or, with mpi4py, give shoal.init the url mpi://"):
        read(several_hosts)
    for environ, name in ((several_hosts, "Open MPI"), (mpich(1, 4, 1), "MPICH"), (slurm(1, 4, 1), "Slurm")):
        launch = read_mpi({**environ, "RANK": "7", "WORLD_SIZE": "8"})
        assert launch is not None
        assert (launch.launcher, launch.rank, launch.size) == (name, 1, 4)
    assert read_mpi(torchrun(1, 4, 1)) is None


def test_a_launcher_that_forgot_a_variable_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match="looks like Open MPI's, but OMPI_COMM_WORLD_SIZE is not set"
    ):
        read({"OMPI_COMM_WORLD_RANK": "0"})


def test_several_hosts_without_a_secret_are_told_how_to_set_one() -> None:
    environ = {**by_hand(1, 2, 29500), "MASTER_ADDR": "192.0.2.7"}
    with pytest.raises(ConfigurationError, match=r"torchrun: .* has no secret: .*openssl rand"):
        rendezvous_at("env://", environ=environ)


def test_the_environment_cannot_send_us_back_to_itself() -> None:
    with pytest.raises(ConfigurationError, match="must be the URL of a store, not env://"):
        rendezvous_at("env://", environ={"SHOAL_STORE": "env://"})


@pytest.mark.parametrize(("name", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_a_rank_is_no_group_of_one(name: str, missing: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is set, but {missing} is not"):
        read({name: "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    launch = read({name: "2", **slurm(1, 2, 1)})
    assert launch is not None
    assert launch.launcher == "Slurm"


def test_slurm_without_a_steps_number_is_recognised_outside_batch_scripts() -> None:
    environ = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "5", "SLURM_NODELIST": "node[3-4]"}
    launch = read(environ)
    assert launch is not None
    assert (launch.rank, launch.size) == (1, 2)
    assert launch.url == f"tcp://node3:{derived_port('slurm-5.0')}"
    batch = {**environ, "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
    assert read(batch) is None
    launch = read({**batch, "SHOAL_STORE": "tcp://127.0.0.1:29400"})
    assert launch is not None
    assert (launch.rank, launch.url) == (None, "tcp://127.0.0.1:29400")


def test_slurm_meets_at_the_master_that_was_named() -> None:
    nodes = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[003-004]"}
    launch = read({**slurm(1, 4, 1), **nodes, "MASTER_ADDR": "node004", "MASTER_PORT": "29500"})
    assert launch is not None
    assert launch.url == "tcp://node004:29500"
