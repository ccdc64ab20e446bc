"""torch.distributed with its Gloo backend, and with the backend "shoal"."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ....compat.registration import register
from .engine import Call, ContenderRank, Values, torch_values

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Gloo(ContenderRank):
    """A rank that reads RANK and WORLD_SIZE, and finds its peers through a file."""

    backend = "gloo"

    def __init__(self, control: str, hosts: int) -> None:
        torch.set_num_threads(1)
        self.uss_before = psutil.Process().memory_full_info().uss
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = f"file://{control}.{self.backend}"
        dist.init_process_group(self.backend, init_method=place, rank=rank, world_size=size)
        self.rank, self.size = rank, size
        self.version = f"torch {torch.__version__}"

    def empty(self, variant: str, dtype: str, count: int) -> tuple[Any, Values]:
        x = torch.empty(count, dtype=_DTYPES[dtype], device="cpu")
        return x, torch_values(x)

    def operation(self, name: str, x: Any, out: Any, variant: str) -> Call:
        peer = 1 - self.rank
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(x),
            "broadcast": lambda: dist.broadcast(x, 0),
            "all_gather_single": lambda: dist.all_gather_into_tensor(out, x),
            "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(out, x),
            "all_to_all_single": lambda: dist.all_to_all_single(out, x),
            "send_recv": self.ping_pong(lambda: dist.send(x, peer), lambda: dist.recv(x, peer)),
            "barrier": dist.barrier,
        }
        return calls[name]

    def barrier(self) -> None:
        dist.barrier()

    def start(self, x: Any) -> Any:
        return dist.all_reduce(x, async_op=True)

    def new_group(self) -> Call:
        group = dist.new_group(backend=self.backend)
        return lambda: dist.destroy_process_group(group)

    def close(self) -> None:
        dist.destroy_process_group()


class InTorch(Gloo):
    """The same calls with the backend "shoal" of torch.distributed."""

    backend = "shoal"

    def __init__(self, control: str, hosts: int) -> None:
        register()
        super().__init__(control, hosts)
