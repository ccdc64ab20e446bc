"""An MPI library, called through mpi4py on numpy arrays, in place if MPI supports it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from ..case import REDUCTIONS
from .engine import STORAGE, Call, ContenderRank, Unsupported, Values


class Mpi(ContenderRank):
    """A rank started by the library's mpiexec."""

    def __init__(self, control: str, hosts: int) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        library = self._mpi.Get_library_version().split("\n")[0].split(",")[0]
        self.version = " ".join(library.split())

    def empty(self, variant: str, dtype: str, count: int) -> tuple[Any, Values]:
        x = np.empty(count, STORAGE[dtype])
        return x, x

    def operation(self, name: str, x: Any, out: Any, variant: str) -> Call:
        if name in REDUCTIONS and x.dtype == np.uint16:
            raise Unsupported("MPI has no reductions of bfloat16")
        comm, in_place, peer = self._comm, self._mpi.IN_PLACE, 1 - self.rank
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(in_place, x),
            "broadcast": lambda: comm.Bcast(x, 0),
            "all_gather_single": lambda: comm.Allgather(x, out),
            "reduce_scatter_single": lambda: comm.Reduce_scatter_block(x, out),
            "all_to_all_single": lambda: comm.Alltoall(x, out),
            "send_recv": self.ping_pong(lambda: comm.Send(x, peer), lambda: comm.Recv(x, peer)),
            "barrier": comm.Barrier,
        }
        return calls[name]

    def barrier(self) -> None:
        self._comm.Barrier()
