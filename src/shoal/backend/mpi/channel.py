"""The MPI backend: collectives of CPU tensors by an MPI library, through mpi4py.

It is the native backend with another way to move data: the members of a group meet and compare their calls,
and then the core calls MPI (``cpp/mpi/``).  Python makes the communicators.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ... import _core, config
from ...common.formatting import describe_error, ranks_named
from ...common.mpi_library import library_name, mark_broken, mpi
from ...errors import RendezvousError, UsageError
from ...future import Future
from ...rendezvous.membership import Membership
from ...spec import FailureScope, Operation, OpKind
from ..base import GroupSpec
from ..native.channel import NativeBackend, NativeChannel
from ..native.gathering import all_gather_bytes
from ..registry import MPI, NATIVE
from . import library

#: of an address: rank and size in MPI.COMM_WORLD, and whether MPI reduces
_ADDRESS = struct.Struct("<II?")
#: operations whose data MPI does not move
_NATIVE_KINDS = frozenset({OpKind.BARRIER, OpKind.SEND, OpKind.RECV})
#: Maximum size of a group whose members pass parts by single messages, each to all others at once.  On one
#: host they are faster than the nonblocking collectives of MPI libraries.  In larger groups libraries know
#: better what to send first, and along which links.
_MAX_EXCHANGING = 8
#: seconds for which that thread waits for the other members at a time
_SLICE_S = 0.1
#: seconds that a thread which makes communicators gets when its group has failed
_STUCK_TIMEOUT_S = 1.0
#: channels whose communicators MPI may still use; kept until the process ends
_abandoned: list[object] = []


class MpiBackend(NativeBackend):
    """Connects the ranks natively, and moves the data of collectives by MPI; takes the native options.

    Args:
        reductions: ``"native"``: shoal's kernels reduce; results have the bits of the native backend.
            ``"mpi"``: MPI reduces what it supports, in its own order, so that networks can do it; the same on
            all ranks.  None: ``SHOAL_MPI_REDUCTIONS``.
    """

    name = "mpi"
    default_url = "mpi://"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        _checked_reductions(options.get("reductions"))

    def __init__(
        self, membership: Membership, *, timeout: float, reductions: str | None = None, **options: Any
    ) -> None:
        deadline = time.monotonic() + timeout
        mpi_reduces = _checked_reductions(reductions) == MPI
        self.mpi = mpi()
        world = self.mpi.COMM_WORLD
        address = _ADDRESS.pack(world.Get_rank(), world.Get_size(), mpi_reduces)
        #: The rank in MPI.COMM_WORLD of each rank.
        self.world_ranks = [world.Get_rank()]
        self.library = library.core_library(self.mpi)
        self.datatypes = library.datatypes(self.mpi)
        self.reductions = library.reductions(self.mpi) if mpi_reduces else {}
        self._broken = False
        super().__init__(membership, timeout=timeout, **options)
        try:
            if membership.size > 1:
                left = max(deadline - time.monotonic(), 0.1)
                addresses = all_gather_bytes(self, membership, address, left)
                self.world_ranks = checked_addresses(
                    addresses, membership.rank, mpi_reduces, library_name(self.mpi)
                )
        except BaseException:
            self.close(0.0)
            raise
        self._context.use(self.library)

    def channel(self, group: GroupSpec) -> NativeChannel:
        # The group that exchanges the addresses has no communicator.
        if group.scope == FailureScope.PAIR or len(group.ranks) == 1 or len(self.world_ranks) == 1:
            return super().channel(group)
        return MpiChannel(self, self._core_group(group, moved=True), group)

    def mpi_broke(self) -> None:
        """Note that MPI cannot be finalised: operations are incomplete."""
        self._broken = True

    def close(self, timeout: float) -> None:
        try:
            super().close(timeout)
        finally:
            if self._broken:
                mark_broken()


class MpiChannel(NativeChannel):
    """The channel of one group: a native one whose numbered collectives are moved by MPI."""

    ordered = True

    def __init__(self, backend: MpiBackend, core: _core.Group, spec: GroupSpec) -> None:
        super().__init__(backend, core, spec)
        self._mpi_backend = backend
        self._making = threading.Lock()
        #: Makes the communicators on the first collective, because that waits for the other members.
        self._thread: threading.Thread | None = None
        self._communicators: list[Any] = []
        self._closed = False

    def keeps_order(self, operation: Operation) -> bool:
        return operation.kind not in _NATIVE_KINDS

    def submit(self, operation: Operation) -> Future[Any]:
        if self._thread is not None or not self.keeps_order(operation):
            return super().submit(operation)
        core = self._submit_collective(operation)
        self._start_thread(core)
        return self._future_of(core, operation)

    def _start_thread(self, first: _core.Operation) -> None:
        with self._making:
            if self._thread is None and not self._closed:
                name = f"shoal-mpi-{self._spec.name}"
                thread = threading.Thread(target=self._connect, args=(first,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    self.abort(f"MPI failed there: {describe_error(error)}")
                self._thread = thread

    def _connect(self, first: _core.Operation) -> None:
        """Make a communicator for each lane, when all members have called the first collective."""
        backend, spec, core = self._mpi_backend, self._spec, self._core
        try:
            while not first.wait_met(_SLICE_S):
                pass
            if not first.met():
                return  # the group is broken or closed
            made = _communicators(backend.mpi, [backend.world_ranks[rank] for rank in spec.ranks], spec)
            with self._making:
                self._communicators = made
                if not self._closed:
                    handles = [library.handle(backend.mpi, communicator) for communicator in made]
                    _core.move_by_mpi(
                        core, backend.library, handles, backend.datatypes, backend.reductions,
                        len(spec.ranks) <= _MAX_EXCHANGING,
                    )  # fmt: skip
        except Exception as error:
            if not core.broken():
                backend.mpi_broke()
                self.abort(f"MPI failed there: {describe_error(error)}")

    def close(self, timeout: float) -> None:
        deadline, core = time.monotonic() + timeout, self._core
        try:
            super().close(timeout)
        finally:
            self._free_communicators(max(deadline - time.monotonic(), 0.1), core)

    def _free_communicators(self, timeout: float, core: _core.Group) -> None:
        with self._making:
            self._closed = True
        thread = self._thread
        if thread is not None:
            thread.join(min(timeout, _STUCK_TIMEOUT_S) if core.broken() else timeout)
        if (thread is not None and thread.is_alive()) or core.abandoned():
            self._mpi_backend.mpi_broke()
            _abandoned.append((thread, self._communicators))
        else:
            for communicator in self._communicators:
                communicator.Free()
        self._communicators = []


def _communicators(mpi: Any, members: Sequence[int], spec: GroupSpec) -> list[Any]:
    """Make a communicator for each lane of a group; waits for the other members."""
    group = mpi.COMM_WORLD.Get_group().Incl(members)
    # Communicators of several groups may be made at the same time, with different tags.
    tag = spec.ident % (mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) + 1)
    first = mpi.COMM_WORLD.Create_group(group, tag)
    group.Free()
    first.Set_errhandler(mpi.ERRORS_RETURN)
    return [first, *(first.Dup() for _ in range(spec.tuning.concurrency - 1))]


def checked_addresses(addresses: Sequence[bytes], rank: int, mpi_reduces: bool, name: str) -> list[int]:
    """Return the rank in MPI.COMM_WORLD of each rank.

    Args:
        addresses: of all ranks, as received.
        rank: this one.
        mpi_reduces: whether MPI reduces here.
        name: of the MPI library here.

    Raises:
        RendezvousError: the ranks cannot use MPI together; raised on all of them.
    """
    found = [_ADDRESS.unpack(address) for address in addresses if len(address) == _ADDRESS.size]
    ranks = [its for its, size, _ in found if its < size]
    if len(ranks) != len(addresses):
        raise RendezvousError(f"rank {rank}: a rank of this job gave no valid rank of MPI")
    if len(set(ranks)) != len(ranks) or len({size for _, size, _ in found}) != 1:
        places = ", ".join(f"{its} of {size}" for its, size, _ in found)
        raise RendezvousError(
            f"rank {rank}: in MPI.COMM_WORLD the ranks of this job are {places}; start all of them "
            f"by one mpiexec, of {name}, which mpi4py loads here"
        )
    others = [its for its, (_, _, reduces) in enumerate(found) if reduces != mpi_reduces]
    if others:
        raise RendezvousError(
            f"rank {rank}: reductions={MPI if mpi_reduces else NATIVE!r} here, and another "
            f"value on {ranks_named(others)}; give all ranks the same"
        )
    return ranks


def _checked_reductions(given: object) -> str:
    if given is None:
        return config.MPI_REDUCTIONS.get()
    if given not in (NATIVE, MPI):
        raise UsageError(f"reductions={given!r}: expected 'native' or 'mpi'")
    return str(given)
