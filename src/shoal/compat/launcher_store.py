"""The store of a torch default group whose ranks were connected by their launcher's variables.

torch's rendezvous returns a store, a rank and the number of ranks, but Slurm, MPICH and Open MPI provide no
store.  So the ranks connect as in :func:`shoal.init`, and torch gets a store on top of theirs.  The backend
then takes the membership from that store instead of performing a second rendezvous.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed.constants import default_pg_timeout

from .. import config
from ..backend.registry import backend_factory, default_backend
from ..errors import RendezvousError
from ..initialize import default_url, refuse_joiner
from ..net import Deadline
from ..rendezvous import Membership, RendezvousPoint, Request, Venue
from ..rendezvous.launcher_variables import job_name, read
from ..rendezvous.membership import open_and_rendezvous
from ..rendezvous.point import checked_request
from ..rendezvous.venue import START_AGAIN, store_address
from ..store import PrefixStore, Store
from ..torch_terms import BACKEND
from .torch_store import TorchStore


@dataclass(frozen=True, slots=True)
class TorchLaunch:
    """The rank, size and job of this process for torch's default group."""

    #: rank, size: the arguments of ``init_process_group``; None: from the launcher or the store
    rank: int | None
    size: int | None
    job: str | None  # name of the job for the rendezvous; None: the launcher's
    url: str | None = None  # of the rendezvous; None: ``env://``


class LauncherStore(TorchStore):
    """A store for torch that also carries the membership of this process.

    Args:
        membership: the result of the rendezvous; abandoned unless a group takes it.
    """

    def __init__(self, membership: Membership) -> None:
        super().__init__(PrefixStore("torch", membership.store))
        self._membership: Membership | None = membership

    def take(self) -> Membership | None:
        """Return the membership, or None if it was already taken.

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


def launch_from_environment(
    parameters: Mapping[str, str], environ: Mapping[str, str], torch_variables: Collection[str]
) -> TorchLaunch | None:
    """Return the process's place from its launcher; None: torch's handler decides.

    Without a launcher the process is a group of size 1, as with :func:`shoal.init`, so that the same script
    runs as ``python train.py``.  If one of torch's variables is set, or the rank or size of a larger group is
    given, the configuration is incomplete.  Each process would then silently train alone; torch's handler
    raises an error that names the missing variable instead.

    ``parameters`` are those of the URL, where torch puts the arguments rank and world_size;
    ``torch_variables`` are those that torch's handler reads.

    Raises ConfigurationError if a variable of the launcher is malformed or missing.
    """
    rank, size = (int(parameters[name]) if name in parameters else None for name in ("rank", "world_size"))
    if (url := default_url(backend_factory(default_backend()))) is not None:
        # A separate job name, because the program may also call shoal.init().
        return TorchLaunch(rank, size, BACKEND, url)
    launch = read(environ)
    if launch is None:
        alone = (rank, size) in ((None, None), (None, 1), (0, 1))
        is_torchs = any(environ.get(name) for name in torch_variables)
        return TorchLaunch(rank, size, None) if alone and not is_torchs else None
    # If only the store knows the number of ranks, the number is stored under the launcher's job.
    job = None if launch.size is None and size is None else f"{launch.job}/{BACKEND}"
    return TorchLaunch(rank, size, job)


def rendezvous_once(
    launch: TorchLaunch, timeout: timedelta | None
) -> Iterator[tuple[LauncherStore, int, int]]:
    """Connect to the other ranks and yield one tuple (store, rank, number of ranks), as torch's handlers do.

    Raises the errors of :func:`shoal.init`.
    """
    config.check_environment()
    if launch.rank is None:
        refuse_joiner()
    seconds = group_timeout(timeout or default_pg_timeout).total_seconds()
    request = checked_request(
        launch.url, store=None, rank=launch.rank, size=launch.size, timeout=seconds, secret=None, host=None,
        job=launch.job,
    )  # fmt: skip
    membership = open_and_rendezvous(replace(request, launcher_job=job_name(request.environ)))
    store = LauncherStore(membership)
    try:
        yield store, membership.rank, membership.size
    finally:
        # torch closes the generator at the end of init_process_group.
        store.abandon(
            RendezvousError(
                f"rank {membership.rank} created no group of {BACKEND}: its init_process_group failed after "
                "the rendezvous"
            )
        )


def rendezvous_point(
    store: Store,
    rank: int,
    size: int,
    name: str,
    deadline: Deadline,
    *,
    partial: bool = False,
    advice: str = START_AGAIN,
) -> RendezvousPoint:
    """Return the point where the members of a group ``name`` meet over torch's store.

    Args:
        partial: its ranks are not those of the job, but are numbered among the members.
    """
    # torch trusts every process that can read its store, so the ranks may exchange their secret through it.
    # The store may close before the group: torch lets rank 0 serve it, and torch's C++ prints a stack trace
    # when a store is closed.
    venue = Venue(
        store, rank=rank, size=size, job=f"{BACKEND}/{name}", epoch=0,
        private=True, leaves_store_early=True, advice=advice, address=store_address(store),
    )  # fmt: skip
    job = job_name(os.environ)
    request = Request(
        urlsplit("store://"), rank, size, config.secret(), deadline,
        launcher_job=f"{job}/{name}" if partial else job,
    )  # fmt: skip
    return RendezvousPoint.at(venue, request)


def launcher_store(store: object) -> LauncherStore | None:
    """Return the :class:`LauncherStore` below torch's prefix stores, or None."""
    while store is not None and not isinstance(store, LauncherStore):
        store = getattr(store, "underlying_store", None)
    return store


def group_timeout(given: timedelta) -> timedelta:
    """Return the timeout from torch, or ``SHOAL_TIMEOUT`` if torch's is the default.

    torch does not report whether the user chose the default.
    """
    if given == default_pg_timeout and config.TIMEOUT.is_set():
        return timedelta(seconds=config.TIMEOUT.get())
    return given
