"""The store of a default group of torch whose ranks have met by the variables of their launcher.

torch's rendezvous returns a store, a rank and the number of ranks.  Slurm, MPICH and Open MPI name no store.
So the ranks meet in the same way as in :func:`shoal.init`, and torch gets a store on top of theirs.  The
backend then takes the membership from that store instead of meeting a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed.constants import default_pg_timeout

from .. import config
from ..errors import RendezvousError
from ..initialize import refuse_joiner
from ..rendezvous import Membership, rendezvous
from ..rendezvous.environment import read
from ..store import PrefixStore
from ..torch_terms import BACKEND
from .torch_store import TorchStore


@dataclass(frozen=True, slots=True)
class TorchLaunch:
    """The place of this process for torch's default group.

    Attributes:
        rank, size: the arguments of ``init_process_group``; None where the launcher or the store has to say.
        job: name of the job in which the ranks meet; None: as the launcher says.
    """

    rank: int | None
    size: int | None
    job: str | None


class LauncherStore(TorchStore):
    """A store for torch that also carries the membership of this process.

    Args:
        membership: the result of the rendezvous; abandoned unless a group takes it.
    """

    def __init__(self, membership: Membership) -> None:
        super().__init__(PrefixStore("torch", membership.store))
        self._membership: Membership | None = membership

    def take(self) -> Membership | None:
        """Return the membership, or None if it was taken before.

        Releasing or abandoning it also closes this store.
        """
        membership, self._membership = self._membership, None
        if membership is None:
            return None

        def release(timeout: float) -> None:
            try:
                membership.release(timeout)
            finally:
                self.close()

        def abandon(error: BaseException) -> None:
            try:
                membership.abandon(error)
            finally:
                self.close()

        return replace(membership, release=release, abandon=abandon)

    def abandon(self, error: BaseException) -> None:
        """Report ``error`` to the other ranks and close the store, unless the membership was taken."""
        membership = self.take()
        if membership is not None:
            membership.abandon(error)


def launch_of(
    parameters: Mapping[str, str], environ: Mapping[str, str], torch_variables: Collection[str]
) -> TorchLaunch | None:
    """Return the place that the launcher gives to this process; None if torch's handler has to decide.

    Without a launcher the process is a group of one, as with :func:`shoal.init`, so that the same script runs
    as ``python train.py``.  If one of torch's variables is set, or the rank or size of a larger group was
    given, the place is incomplete.  Each process would then silently train alone, so torch's handler raises
    instead and names the missing variable.

    Args:
        parameters: of the URL: torch writes the arguments rank and world_size there.
        environ: the environment.
        torch_variables: the variables that torch's handler reads.

    Raises:
        ConfigurationError: a variable of the launcher is malformed or missing.
    """
    rank, size = (int(parameters[name]) if name in parameters else None for name in ("rank", "world_size"))
    launch = read(environ)
    if launch is None:
        alone = (rank, size) in ((None, None), (None, 1), (0, 1))
        is_torchs = any(environ.get(name) for name in torch_variables)
        return TorchLaunch(rank, size, None) if alone and not is_torchs else None
    # A separate job name, because the program may call shoal.init() as well.  If only the store knows the
    # number of ranks, it keeps it under the launcher's job.
    job = None if launch.size is None and size is None else f"{launch.job}/{BACKEND}"
    return TorchLaunch(rank, size, job)


def met(launch: TorchLaunch, timeout: timedelta | None) -> Iterator[tuple[LauncherStore, int, int]]:
    """Meet the other ranks and yield one tuple (store, rank, number of ranks), as torch's handlers do.

    Args:
        launch: the place of this process.
        timeout: of ``init_process_group``.

    Raises:
        ShoalError: the same errors as :func:`shoal.init`.
    """
    config.check()
    if launch.rank is None:
        refuse_joiner()
    seconds = group_timeout(timeout or default_pg_timeout).total_seconds()
    membership = rendezvous(rank=launch.rank, size=launch.size, timeout=seconds, job=launch.job)
    store = LauncherStore(membership)
    try:
        yield store, membership.rank, membership.size
    finally:
        # torch drops the generator at the end of init_process_group.
        store.abandon(
            RendezvousError(
                f"rank {membership.rank} made no group of {BACKEND}: its init_process_group failed after the "
                "ranks had met"
            )
        )


def launcher_store(store: Any) -> LauncherStore | None:
    """Return the :class:`LauncherStore` below torch's prefix stores, or None."""
    while store is not None and not isinstance(store, LauncherStore):
        store = getattr(store, "underlying_store", None)
    return store


def group_timeout(given: timedelta) -> timedelta:
    """Return the timeout from torch, or ``SHOAL_TIMEOUT`` if torch's is the default.

    torch does not tell whether the user chose the default.
    """
    if given == default_pg_timeout and config.TIMEOUT.is_set():
        return timedelta(seconds=config.TIMEOUT.get())
    return given
