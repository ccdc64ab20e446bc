"""shoal, with ordinary tensors or tensors in the group's registered memory."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from .engine import Call, ContenderRank, Values, torch_values

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Shoal(ContenderRank):
    """A rank under ``shoal run``; with `hosts`, ranks are on simulated hosts, in equal blocks."""

    def __init__(self, control: str, hosts: int) -> None:
        torch.set_num_threads(1)
        self.uss_before = psutil.Process().memory_full_info().uss
        if hosts > 1:
            rank, size = int(os.environ["SHOAL_RANK"]), int(os.environ["SHOAL_SIZE"])
            os.environ["SHOAL_HOST_ID"] = f"bench-{rank * hosts // size}"
        from .... import __version__
        from ....initialize import init

        self.group = init()
        self.rank, self.size = self.group.rank, self.group.size
        self.version = f"shoal {__version__}"

    def empty(self, variant: str, dtype: str, count: int) -> tuple[Any, Values]:
        if variant == "registered":
            x = self.group.empty(count, dtype=_DTYPES[dtype])
        else:
            x = torch.empty(count, dtype=_DTYPES[dtype], device="cpu")
        return x, torch_values(x)

    def operation(self, name: str, x: Any, out: Any, variant: str) -> Call:
        group, peer = self.group, 1 - self.rank
        calls: dict[str, Call] = {
            "all_reduce": lambda: group.all_reduce(x).wait(),
            "broadcast": lambda: group.broadcast(x, 0).wait(),
            "all_gather_single": lambda: group.all_gather_single(out, x).wait(),
            "reduce_scatter_single": lambda: group.reduce_scatter_single(out, x).wait(),
            "all_to_all_single": lambda: group.all_to_all_single(out, x).wait(),
            "send_recv": self.ping_pong(
                lambda: group.send(x, peer).wait(), lambda: group.recv(x, peer).wait()
            ),
            "barrier": lambda: group.barrier().wait(),
        }
        return calls[name]

    def barrier(self) -> None:
        self.group.barrier().wait()

    def start(self, x: Any) -> Any:
        return self.group.all_reduce(x)

    def new_group(self) -> Call:
        group = self.group.split(0)
        assert group is not None
        return group.close

    def close(self) -> None:
        self.group.close()
