"""Every init method and store of torch's, and every way to name the backend; several in each process."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shoal.testing.processes import fork_server
from tests.support.ports import free_port


def summed(size: int) -> None:
    """All of the default group add up something, and leave it."""
    x = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    assert x.unique().tolist() == [size * (size + 1) / 2]
    dist.destroy_process_group()
    assert not dist.is_initialized()


def by_each_init_method(rank: int, folder: str, ports: list[int]) -> None:
    import shoal  # noqa: F401

    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": 2}
    dist.init_process_group("shoal", init_method=f"tcp://127.0.0.1:{ports[0]}", **place)
    summed(2)
    dist.init_process_group("cpu:shoal", init_method=f"file://{folder}/meet", **place)
    summed(2)
    store = dist.TCPStore("127.0.0.1", ports[1], 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("shoal", store=store, **place)
    summed(2)
    dist.init_process_group("cpu:shoal,cuda:gloo", store=dist.PrefixStore("again", store), **place)
    assert dist.get_backend_config() == "cpu:shoal,cuda:gloo"
    summed(2)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(ports[2]),
    }
    dist.init_process_group("shoal", init_method="env://")
    summed(2)
    dist.init_process_group("shoal", store=dist.FileStore(f"{folder}/store", 2), **place)
    summed(2)
    dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=1)
    summed(1)


def test_spawned_ranks_meet_by_each_init_method_and_store_of_torch(tmp_path: Path) -> None:
    fork_server()  # which has imported torch
    arguments = (str(tmp_path), [free_port() for _ in range(3)])
    mp.start_processes(by_each_init_method, arguments, nprocs=2, start_method="forkserver")
