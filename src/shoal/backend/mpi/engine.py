"""The MPI engine: collectives of CPU tensors by an MPI library, through mpi4py."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...common.mpi_library import library_name, mark_broken, mpi
from ...errors import RendezvousError
from ...rendezvous.membership import Membership
from ..engine import Communicator, Engine, Setup
from ..supervised import SupervisedBackend
from .communicator import MpiCommunicator

#: of an address: rank and size in MPI.COMM_WORLD
_ADDRESS = struct.Struct("<II")


class MpiEngine(Engine):
    """The MPI library of this process."""

    name = "MPI"

    def __init__(self, membership: Membership) -> None:
        self._mpi = mpi()
        self._rank, self._size = membership.rank, membership.size
        world = self._mpi.COMM_WORLD
        self.address = _ADDRESS.pack(world.Get_rank(), world.Get_size())
        #: the rank in MPI.COMM_WORLD of each rank
        self._world_ranks: list[int] = []

    def connect(self, addresses: Sequence[bytes]) -> None:
        found = [_ADDRESS.unpack(address) for address in addresses if len(address) == _ADDRESS.size]
        ranks = [rank for rank, size in found if rank < size]
        if len(ranks) != self._size:
            raise RendezvousError(f"rank {self._rank}: a rank of this job gave no valid rank of MPI")
        if len(set(ranks)) != len(ranks) or len({size for _, size in found}) != 1:
            places = ", ".join(f"{rank} of {size}" for rank, size in found)
            raise RendezvousError(
                f"rank {self._rank}: in MPI.COMM_WORLD the ranks of this job are {places}; start all of them "
                f"by one mpiexec, of {library_name(self._mpi)}, which mpi4py loads here"
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
        return MpiCommunicator(mpi, first, second)

    def progress(self) -> None:
        self._mpi.COMM_SELF.Iprobe()

    def close(self, *, broken: bool) -> None:
        if broken:
            mark_broken()


class MpiBackend(SupervisedBackend):
    """Connects the ranks natively, and moves the data of collectives by MPI; takes the native options."""

    name = "mpi"
    default_url = "mpi://"
    engine_type = MpiEngine
