"""The environments that launchers give to their ranks, for one host."""

from __future__ import annotations

from collections.abc import Callable

Environment = dict[str, str]


def shoal_run(rank: int, size: int, port: int) -> Environment:
    return {
        "SHOAL_STORE": f"tcp://127.0.0.1:{port}",
        "SHOAL_RANK": str(rank),
        "SHOAL_SIZE": str(size),
        "SHOAL_LOCAL_RANK": str(rank),
        "SHOAL_LOCAL_SIZE": str(size),
        "SHOAL_JOB": "some job",
        "SHOAL_EPOCH": "7",
    }


def by_hand(rank: int, size: int, port: int) -> Environment:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def torchrun(rank: int, size: int, port: int) -> Environment:
    return {
        **by_hand(rank, size, port),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def slurm(rank: int, size: int, port: int) -> Environment:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "node003",
    }


def open_mpi(rank: int, size: int, port: int) -> Environment:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "PMIX_NAMESPACE": "prterun-node-4711@1",
    }


def mpich(rank: int, size: int, port: int) -> Environment:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "PMI_FD": "6",
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size),
    }


def open_mpi_with_master(rank: int, size: int, port: int) -> Environment:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**open_mpi(rank, size, port), **master}


def mpich_with_store(rank: int, size: int, port: int) -> Environment:
    return {**mpich(rank, size, port), "SHOAL_STORE": f"tcp://127.0.0.1:{port}"}


def kubernetes(rank: int, size: int, port: int) -> Environment:
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "JOB_COMPLETION_INDEX": str(rank),
        "SHOAL_SIZE": str(size),
        "SHOAL_STORE": f"tcp://127.0.0.1:{port}",
    }


ALL = [
    shoal_run,
    by_hand,
    torchrun,
    slurm,
    open_mpi,
    mpich,
    open_mpi_with_master,
    mpich_with_store,
    kubernetes,
]
Maker = Callable[[int, int, int], Environment]
