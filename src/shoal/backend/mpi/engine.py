"""The MPI engine: collectives of CPU tensors by an MPI library, through mpi4py."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ... import config
from ...common.formatting import ranks_named
from ...common.mpi_library import library_name, mark_broken, mpi
from ...errors import RendezvousError, UsageError
from ...rendezvous.membership import Membership
from ..engine import Communicator, Engine, Setup
from ..registry import MPI, NATIVE
from ..supervised import SupervisedBackend
from .communicator import MpiCommunicator

#: of an address: rank and size in MPI.COMM_WORLD, and whether MPI reduces
_ADDRESS = struct.Struct("<II?")


class MpiEngine(Engine):
    """The MPI library of this process.

    Args:
        mpi_reduces: whether MPI computes the reductions that it supports.
    """

    name = "MPI"

    def __init__(self, membership: Membership, *, mpi_reduces: bool = False) -> None:
        self._mpi = mpi()
        self._rank, self._size = membership.rank, membership.size
        self._mpi_reduces = mpi_reduces
        world = self._mpi.COMM_WORLD
        self.address = _ADDRESS.pack(world.Get_rank(), world.Get_size(), mpi_reduces)
        #: the rank in MPI.COMM_WORLD of each rank
        self._world_ranks: list[int] = []

    def connect(self, addresses: Sequence[bytes]) -> None:
        found = [_ADDRESS.unpack(address) for address in addresses if len(address) == _ADDRESS.size]
        ranks = [rank for rank, size, _ in found if rank < size]
        if len(ranks) != self._size:
            raise RendezvousError(f"rank {self._rank}: a rank of this job gave no valid rank of MPI")
        if len(set(ranks)) != len(ranks) or len({size for _, size, _ in found}) != 1:
            places = ", ".join(f"{rank} of {size}" for rank, size, _ in found)
            raise RendezvousError(
                f"rank {self._rank}: in MPI.COMM_WORLD the ranks of this job are {places}; start all of them "
                f"by one mpiexec, of {library_name(self._mpi)}, which mpi4py loads here"
            )
        others = [rank for rank, (_, _, mpi_reduces) in enumerate(found) if mpi_reduces != self._mpi_reduces]
        if others:
            raise RendezvousError(
                f"rank {self._rank}: reductions={MPI if self._mpi_reduces else NATIVE!r} here, and another "
                f"value on {ranks_named(others)}; give all ranks the same"
            )
        self._world_ranks = ranks

    def communicator(self, setup: Setup) -> Communicator:
        mpi, spec = self._mpi, setup.spec
        members = mpi.COMM_WORLD.Get_group().Incl([self._world_ranks[rank] for rank in spec.ranks])
        # Communicators of several groups may be made at the same time, with different tags.
        tag = spec.ident % (mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) + 1)
        first = mpi.COMM_WORLD.Create_group(members, tag)
        first.Set_errhandler(mpi.ERRORS_RETURN)
        second = first.Dup()
        members.Free()
        return MpiCommunicator(mpi, first, second, self._mpi_reduces)

    def progress(self) -> None:
        self._mpi.COMM_SELF.Iprobe()

    def close(self, *, broken: bool) -> None:
        if broken:
            mark_broken()


class MpiBackend(SupervisedBackend):
    """Connects the ranks natively, and moves the data of collectives by MPI; takes the native options.

    Args:
        reductions: ``"native"``: shoal's kernels reduce; results have the bits of the native backend.
            ``"mpi"``: MPI reduces what it supports, in its own order, so that networks can do it; the same on
            all ranks.  None: ``SHOAL_MPI_REDUCTIONS``.
    """

    name = "mpi"
    default_url = "mpi://"
    engine_type = MpiEngine

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        _checked_reductions(options.get("reductions"))

    def __init__(
        self,
        membership: Membership,
        *,
        timeout: float,
        reductions: str | None = None,
        transport: str | None = None,
        heartbeat_timeout: float | None = None,
        shared_memory_limit: int | None = None,
    ) -> None:
        self._mpi_reduces = _checked_reductions(reductions) == MPI
        super().__init__(
            membership,
            timeout=timeout,
            transport=transport,
            heartbeat_timeout=heartbeat_timeout,
            shared_memory_limit=shared_memory_limit,
        )

    def make_engine(self, membership: Membership) -> Engine:
        return MpiEngine(membership, mpi_reduces=self._mpi_reduces)


def _checked_reductions(given: object) -> str:
    if given is None:
        return config.MPI_REDUCTIONS.get()
    if given not in (NATIVE, MPI):
        raise UsageError(f"reductions={given!r}: expected 'native' or 'mpi'")
    return str(given)
