"""``shoal.init``: from nothing to a process group of everybody in the job.

A rendezvous says who this process is, a backend from the registry connects it, and both belong to a
:class:`~shoal.world.World`, on which the group of all ranks stands.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from . import config
from .backend.arguments import check_options, lanes
from .backend.base import GroupSpec, ident_of
from .backend.registry import BackendFactory, backend_factory
from .common.keywords import checked_seconds
from .errors import ConfigurationError, UsageError
from .group import ProcessGroup
from .group.diagnostics.dumps import directory as dump_directory
from .rendezvous import Membership, rendezvous
from .spec import encodable
from .world import World


def init(
    url: str | None = None,
    *,
    store: object = None,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    secret: str | bytes | None = None,
    backend: str = "native",
    name: str = "world",
    concurrency: int | None = None,
    host_id: str | None = None,
    job: str | None = None,
    **options: Any,
) -> ProcessGroup:
    """Meet the other processes of the job and connect to them.

    Every process of the job calls it; it returns when all have come and are connected.

    Args:
        url: where to meet: ``env://`` (the default: what the launcher's environment says; a group of one
            without a launcher), ``tcp://host:port``, ``file:///path``, or a scheme of
            :func:`shoal.register_store` or :func:`shoal.register_rendezvous`.
        store: where to meet instead of at a url: a :class:`shoal.Store`, or a ``torch.distributed.Store``.
            It must be the same one for all ranks, stays the caller's and is not closed; it must serve until
            all groups are closed.  Without ``secret`` the ranks agree on one in it: whoever can read the
            store, or listen to its connections, can then join their connections.
        rank: of this process; None: as the launcher says, else in order of arrival.
        size: number of processes; None: as the launcher says, else as the job's record in the store.
        timeout: seconds until all must have come, and the group's default for operations; None:
            ``SHOAL_TIMEOUT`` (300 s).
        secret: the job's; None: ``SHOAL_SECRET``, or the file that ``SHOAL_SECRET_FILE`` names; else, on one
            host, what only its user can read (``docs/security.md``).
        backend: name of the data channel: "native", or one given to :func:`shoal.register_backend`.
        name: of the group, for errors and logs.
        concurrency: lanes: how many operations of a group may be in progress at once; None:
            ``SHOAL_CONCURRENCY`` (1).
        host_id: identity of this host; ranks with different values do not share memory.  None:
            ``SHOAL_HOST_ID``, or the machine's own.
        job: name of the job: processes that give the same one meet.  With a name for each, one process can
            be in several worlds at one place.  None: ``SHOAL_JOB``, or as the launcher says.
        options: the backend's own; native takes ``transport="auto"``, ``"shm"`` or ``"tcp"``.

    Returns:
        The group of all processes; a context manager.

    Raises:
        UsageError, ConfigurationError: an argument or variable that cannot be right.
        RendezvousError: the processes contradict each other; RendezvousTimeout names the missing ones.
        AuthenticationError, VersionMismatch: a process does not belong to this job.
    """
    # Whatever is wrong is refused before anybody waits, and in a group of one too.
    config.check()
    dump_directory()
    factory = backend_factory(backend)
    check_options(factory, options, f"shoal.init (backend {backend!r})", _ARGUMENTS)
    count = lanes(concurrency)
    seconds = config.TIMEOUT.get() if timeout is None else checked_seconds("timeout", timeout)
    if url in (None, "env://") and store is None and rank is None:
        refuse_joiner()
    for what, text in (("name", name), ("host_id", host_id)):
        if not isinstance(text, str | None) or text == "":
            raise UsageError(f"{what}={text!r}: expected a str that is not empty")
    membership = rendezvous(
        url, store=store, rank=rank, size=size, timeout=seconds, secret=secret, host=host_id, job=job
    )
    return world_group(membership, factory, name=name, timeout=seconds, concurrency=count, options=options)


#: arguments that :func:`init` takes itself
_ARGUMENTS = [name for name in signature(init).parameters if name != "options"]


def refuse_joiner() -> None:
    """Raise ConfigurationError if ``SHOAL_JOIN`` says that this process joins a running session."""
    if joins := config.JOIN.get():
        raise ConfigurationError(
            f"SHOAL_JOIN={'auto' if joins == 'auto' else 1}: this process has no rank among those that meet "
            "here; it joins a running session by shoal.elastic.Session(state)"
        )


def world_group(
    membership: Membership,
    factory: BackendFactory,
    *,
    name: str,
    timeout: float,
    concurrency: int,
    options: dict[str, Any],
    within: float | None = None,
) -> ProcessGroup:
    """Connect to the others of ``membership`` by the backend that ``factory`` makes; the group of all.

    Args:
        timeout: of the group's operations, in seconds.
        within: seconds until all are connected; None: as ``timeout``.
    """
    name = encodable(name)
    identity = f"{membership.job}/{membership.epoch}/{name}"
    spec = GroupSpec(
        name=name,
        ident=ident_of(identity),
        rank=membership.rank,
        ranks=tuple(range(membership.size)),
        concurrency=concurrency,
        options=options,
    )
    seconds = timeout if within is None else within
    world = World.connect(membership, factory, timeout=seconds, options=options)
    return ProcessGroup._in(world, world.links, spec, membership.store, timeout=timeout)
