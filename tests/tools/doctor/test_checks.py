"""The checks of ``shoal doctor`` find what is wrong with a machine, its settings and its libraries."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from shoal.testing import Network
from shoal.tools.doctor import cgroups, machine, network, settings, software
from shoal.tools.doctor.children import ChildFailed
from shoal.tools.findings import Finding
from tests.support.networks import network as simulated
from tests.support.waiting import until

__all__ = ["simulated"]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a job."""
    for name in [*os.environ]:
        if name.startswith(("SHOAL_", "NCCL_", "GLOO_", "OMP_", "KUBERNETES_")):
            monkeypatch.delenv(name)


def of_kubernetes(monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    """Make this process a pod of an Indexed Job."""
    for name, value in {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "SHOAL_SIZE": "2",
        "SHOAL_STORE": store,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


# -- settings ----------------------------------------------------------------------------------


def test_each_wrong_variable_is_named_and_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE", "redis://me:pass@h:1")
    monkeypatch.setenv("SHOAL_SECRET", "keep it")
    (shown,) = settings.variables()
    assert (shown.status, shown.fact) == ("ok", "set: SHOAL_STORE=redis://me:***@h:1, SHOAL_SECRET")
    monkeypatch.setenv("SHOAL_TIMEOUT", "soon")
    monkeypatch.setenv("SHOAL_RANKS", "1")
    monkeypatch.setenv("SHOAL_XYZ", "1")
    monkeypatch.setenv("SHOAL_TLS_CA", "/ca.pem")
    assert [(each.status, each.fact, each.advice) for each in settings.variables()] == [
        (
            "fail",
            "SHOAL_TIMEOUT='soon': expected a positive number of seconds",
            "correct or unset SHOAL_TIMEOUT",
        ),
        (
            "fail",
            "SHOAL_TLS_CA set without the others of SHOAL_TLS_CA, SHOAL_TLS_CERT, SHOAL_TLS_KEY",
            "set all of these variables and SHOAL_TLS, or none",
        ),
        (
            "warn",
            "SHOAL_RANKS is unknown to shoal and is ignored",
            "rename it to SHOAL_RANK, if you mean that",
        ),
        ("warn", "SHOAL_XYZ is unknown to shoal and is ignored", "unset it, or correct its name"),
    ]


def test_the_secret_has_to_be_long_private_and_there_for_several_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings.secret().status == "ok"
    of_kubernetes(monkeypatch, "tcp://train-0.train:29400")
    found = settings.secret()
    assert (found.status, found.fact) == ("fail", "no secret is set, and the job has several hosts")
    file = tmp_path / "secret"
    monkeypatch.setenv("SHOAL_SECRET_FILE", str(file))
    assert (
        settings.secret().fact == f"SHOAL_SECRET_FILE={str(file)!r} cannot be read: No such file or directory"
    )
    file.write_text("0123456789abcdef0123456789abcdef\n")
    for mode, status in ((0o644, "warn"), (0o620, "warn"), (0o600, "ok"), (0o400, "ok")):
        file.chmod(mode)
        assert settings.secret().status == status, oct(mode)
    monkeypatch.setenv("SHOAL_SECRET", "abc")
    assert settings.secret().fact == "the secret from SHOAL_SECRET has only 3 bytes"


def test_the_launcher_is_named_and_its_contradictions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.launcher().fact.startswith("no launcher has started this process")
    of_kubernetes(monkeypatch, "tcp://train-0.train:29400")
    assert settings.launcher().fact == (
        "started by Kubernetes: rank 1, size 2, job 'default', ranks meet at tcp://train-0.train:29400"
    )
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    assert settings.launcher().status == "fail"
    assert "rank 2 in a job of size 2" in settings.launcher().fact
    assert not settings.has_several_hosts()


def test_a_directory_for_dumps_or_traces_that_cannot_be_made_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, check in (
        ("SHOAL_DUMP_DIR", settings.dump_directory),
        ("SHOAL_TRACE", settings.trace_directory),
    ):
        monkeypatch.setenv(name, str(tmp_path / "new" / "er"))
        assert check().status == "ok"
        for illegal in ("/dev/null/files", "/proc/files", f"{tmp_path}/{'n' * 300}"):
            monkeypatch.setenv(name, illegal)
            assert check().status == "fail", illegal
    assert not [*tmp_path.iterdir()]


# -- network -----------------------------------------------------------------------------------


def test_the_offered_address_is_that_of_the_interface_to_the_store(
    simulated: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kubernetes(monkeypatch, f"tcp://{simulated.address('b')}:29400")
    with simulated.inside("a"):
        mine = simulated.address("a")
        until(lambda: mine in network.addresses())  # a new device runs a moment later
        found = network.offered_address()
        assert (found.status, found.fact) == (
            "ok",
            f"ranks here offer {mine} (eth0, on the route to the store) to other hosts",
        )
        assert network.interfaces().fact.endswith(f"eth0 {mine}")
        assert network.loopback().status == "ok"
        monkeypatch.setenv("SHOAL_INTERFACE", "127.0.0.1")
        found = network.offered_address()
        assert found.status == "fail"
        assert found.fact.startswith(
            "ranks here offer the loopback address 127.0.0.1 (SHOAL_INTERFACE), which"
        )
        assert found.advice == f"set SHOAL_INTERFACE={mine}, the address of eth0"
        monkeypatch.setenv("SHOAL_INTERFACE", simulated.address("b"))
        assert network.offered_address().fact.endswith("is not an address of this host")
        monkeypatch.setenv("SHOAL_INTERFACE", "\udcff")
        assert network.offered_address().fact.startswith("SHOAL_INTERFACE='\\udcff' is not an address")
        monkeypatch.delenv("SHOAL_INTERFACE")
        simulated.down("a")
        found = network.offered_address()
        assert found.status == "fail"
        assert found.advice.startswith("give this host an address that the other hosts can reach")


def test_names_that_are_loopback_or_unknown_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"me": ["127.0.1.1"], "fine": ["10.0.0.3", "fd00::3"], "localhost": ["127.0.0.1"]}

    def resolve(host: str, port: int) -> list[str]:
        try:
            return known[host]
        except KeyError:
            raise OSError(-2, "Name or service not known") from None

    monkeypatch.setattr(network, "resolve", resolve)
    for name, status in (("me", "warn"), ("unknown", "warn"), ("fine", "ok")):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        found = network.host_name()
        assert (found.status, repr(name) in found.fact) == (status, True)
    for host, status in (("localhost", "fail"), ("me", "warn"), ("unknown", "fail"), ("fine", "ok")):
        of_kubernetes(monkeypatch, f"tcp://{host}:29400")
        assert network.store().status == status
    assert network.store().fact == "the store's host 'fine' is 10.0.0.3, fd00::3"
    monkeypatch.setattr("socket.gethostname", lambda: "me")
    of_kubernetes(monkeypatch, "tcp://me:29400")
    assert network.store().status == "ok", "shoal replaces the address"
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    monkeypatch.setenv("SHOAL_STORE", "tcp://localhost:29400")
    assert network.store().status == "ok", "one host"


# -- machine -----------------------------------------------------------------------------------


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_limit_of_the_control_groups_counts(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", tmp_path / "membership")
    assert (cgroups.cpu_quota(), cgroups.memory(), cgroups.processes()) == (None, None, None)
    if version == 2:
        (tmp_path / "membership").write_text("0::/job/step\n")
        group(tmp_path / "job" / "step", cpu__max="max 100000", memory__max="max", memory__current=5)
        group(tmp_path / "job", cpu__max="150000 100000", memory__max=2**31, memory__current=2**30)
        group(tmp_path / "job", pids__max=600, pids__current=200)
    else:
        (tmp_path / "membership").write_text("4:memory:/job\n3:cpu,cpuacct:/not/here\n2:pids:/\n\nx\n")
        group(tmp_path / "memory" / "job", memory__limit_in_bytes=2**31, memory__usage_in_bytes=2**30)
        group(tmp_path / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=2**30)
        group(tmp_path / "cpu,cpuacct", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
        group(tmp_path / "pids", pids__max=600, pids__current=200)
    assert (cgroups.cpu_quota(), cgroups.memory(), cgroups.processes()) == (1.5, (2**31, 2**30), (600, 200))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    assert machine.cores().status == "warn"
    assert "cores 0-2, 5 of" in machine.cores().fact
    assert "with a CPU quota of 1.5 cores" in machine.cores().fact
    found = machine.processes()
    assert (found.status, found.fact) == (
        "warn",
        "400 more processes and threads can start, limited by the control group",
    )
    monkeypatch.setenv("SHOAL_SHARED_MEMORY_LIMIT", "1536M")
    assert machine.memory().advice == "set SHOAL_SHARED_MEMORY_LIMIT to at most 1.0 GB"


def test_threads_are_compared_with_cores_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    assert machine.threads().status == "ok"
    for rank_variable, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(rank_variable, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert machine.threads().advice == "set OMP_NUM_THREADS=2"
    for value_, status in (("2", "ok"), ("3", "warn"), ("many", "warn"), ("2,1", "ok"), ("0", "warn")):
        monkeypatch.setenv("OMP_NUM_THREADS", value_)
        assert machine.threads().status == status, value_


def test_missing_features_of_the_kernel_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert [check().status for check in (machine.memfd, machine.pidfd, machine.robust_list)] == ["ok"] * 3
    monkeypatch.setattr(os, "memfd_create", refuse)
    found = machine.memfd()
    assert (found.status, "memfd_create: Operation not permitted" in found.fact) == ("fail", True)
    monkeypatch.setattr(machine._libc, "syscall", lambda *_: -1)
    assert [check().status for check in (machine.pidfd, machine.robust_list)] == ["warn"] * 2
    monkeypatch.setattr(os, "readlink", refuse)
    assert machine.proc().status == "warn"


def test_a_directory_of_another_user_for_temporary_files_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert machine.temporary_files().fact == f"temporary files are in {tmp_path}"
    assert not list(tmp_path.iterdir())
    private = tmp_path / f"shoal-{os.geteuid()}"
    private.mkdir(mode=0o755)
    private.chmod(stat.S_IRWXU | stat.S_IRGRP)
    assert machine.temporary_files().status == "warn"
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile.gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError(2, "none")))
    assert machine.temporary_files().fact == "there is no directory for temporary files: none"


# -- libraries ---------------------------------------------------------------------------------


def test_an_mpi_library_that_is_missing_is_a_failure_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    assert software.mpi().status == "warn"
    monkeypatch.setenv("SHOAL_BACKEND", "mpi")
    found = software.mpi()
    assert found.status == "fail"
    assert found.fact.startswith(
        "the backend mpi cannot be used: mpi4py found no MPI library: pip install mpich"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert software.mpi().status == "fail"
    monkeypatch.delenv("SHOAL_BACKEND")
    assert software.mpi().fact == "mpi4py is not installed: needed only for the backend mpi and mpi://"


def test_an_mpiexec_of_another_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"library": "MPICH 5.0.2", "file": "libmpi.so.12", "threads": "THREAD_MULTIPLE", "mpi4py": "4.1"}
    monkeypatch.setattr(software, "call", lambda *_, **__: facts)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.mpi().fact.endswith(", no mpiexec on PATH")
    mpiexec = tmp_path / "mpiexec"
    for text, status in (("mpirun (Open MPI) 4.1.4", "warn"), ("HYDRA build details:", "ok"), ("?", "ok")):
        mpiexec.write_text(f"#!/bin/sh\necho '{text}'\n")
        mpiexec.chmod(0o755)
        assert software.mpi().status == status, text


def cuda_finding(monkeypatch: pytest.MonkeyPatch, driver: int, **facts: Any) -> Finding:
    monkeypatch.setattr(software, "call", lambda _: driver)
    every = {"cuda": None, "hip": None, "devices": [], "warning": "", **facts}
    monkeypatch.setattr(software, "torch_facts", lambda: every)
    return software.cuda()


def test_driver_and_build_of_torch_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check = cuda_finding
    assert check(monkeypatch, 0).fact == (
        "no NVIDIA driver; torch is built for CPUs: needed only for CUDA tensors"
    )
    assert check(monkeypatch, 0, cuda="13.0").status == "ok"
    found = check(monkeypatch, 13000)
    assert (found.status, found.fact) == (
        "warn",
        "the driver supports CUDA 13.0; torch is built for CPUs, so it does not use the GPU",
    )
    found = check(monkeypatch, 12080, cuda="13.0", warning="The NVIDIA driver on your system is too old")
    assert (found.status, "(The NVIDIA driver on your system is too old)" in found.fact) == ("warn", True)
    found = check(monkeypatch, 13000, cuda="13.0", devices=["NVIDIA H200", "NVIDIA H200"])
    assert (found.status, found.fact.endswith("; 2 devices: NVIDIA H200")) == ("ok", True)
    monkeypatch.setenv("SHOAL_BACKEND", "nccl")
    assert check(monkeypatch, 0).status == "fail"
    assert check(monkeypatch, 13000).status == "fail"


def test_two_nccl_libraries_in_one_process_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "torch_facts", lambda: {"cuda": None})
    assert software.nccl().fact == "NCCL is not used, because torch has no CUDA"
    monkeypatch.setattr(software, "torch_facts", lambda: {"cuda": "13.0"})
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.6.0")
    loaded: dict[str, Any] = {"version": "2.28.9", "torch": "2.28.9", "files": ["/a/libnccl.so.2"]}
    monkeypatch.setattr(software, "call", lambda _: loaded)
    assert software.nccl().fact == "NCCL 2.28.9 (/a/libnccl.so.2), nccl4py 0.6.0"
    loaded["files"].append("/b/libnccl.so.2")
    assert software.nccl().status == "warn"
    loaded.update(files=["/b/libnccl.so.2"], version="2.27.3")
    assert "torch uses NCCL 2.28.9" in software.nccl().fact

    def missing(_: str) -> None:
        raise ChildFailed("finds no NCCL library")

    monkeypatch.setattr(software, "call", missing)
    assert software.nccl().status == "warn"


def test_variables_of_nccl_that_contradict_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses(**variables: str) -> list[str]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return [each.status for each in software.nccl_variables()]

    assert statuses() == ["ok"]
    assert statuses(NCCL_DEBUG="INFO", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo") == ["ok"]
    assert statuses(NCCL_COMM_BLOCKING="1") == ["warn"]
    assert statuses(NCCL_COMM_BLOCKING="1", SHOAL_BACKEND="nccl") == ["fail"]
    assert statuses(NCCL_SOCKET_IFNAME="nosuch", GLOO_SOCKET_IFNAME="l") == ["warn", "warn"]
    assert statuses(NCCL_SOCKET_IFNAME="=l") == ["warn"]
    assert statuses(NCCL_SOCKET_IFNAME="^nosuch") == ["ok"]
    assert statuses(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1") == ["warn"]
    assert statuses(NCCL_NET="IB", NCCL_IB_DISABLE="1") == ["warn"]
