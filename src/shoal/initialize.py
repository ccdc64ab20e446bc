"""``shoal.init``: creates the process group of all processes of a job.

A rendezvous determines the rank of this process, and a backend from the registry connects it.  Both belong to
a :class:`~shoal.world.World`, which the group uses.
"""

from __future__ import annotations

import os
from inspect import signature
from typing import Any

from . import config
from .backend.base import GroupSpec, check_options
from .backend.identity import Tuning, world_ident
from .backend.registry import BackendFactory, backend_factory, default_backend
from .common.arguments import checked_seconds
from .common.formatting import encodable
from .errors import ConfigurationError, UsageError
from .group import ProcessGroup
from .group.diagnostics.dumps import directory as dump_directory
from .rendezvous import Membership, rendezvous
from .rendezvous.launcher_variables import names_store
from .world import World


def init(
    url: str | None = None,
    *,
    store: object = None,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    secret: str | bytes | None = None,
    backend: str | None = None,
    name: str = "world",
    concurrency: int | None = None,
    algorithm: str | None = None,
    host_id: str | None = None,
    job: str | None = None,
    **options: Any,
) -> ProcessGroup:
    """Connect to the other processes of the job, and return the group of all of them.

    All processes of the job must call it; it returns when all are connected.

    Args:
        url: where to find the other processes: ``env://`` (the default: environment variables of the
            launcher; a group of one without a launcher), ``tcp://host:port``, ``file:///path``, ``mpi://``
            (the default with the backend "mpi", unless the environment names a store), or a scheme of
            :func:`shoal.register_store` or :func:`shoal.register_rendezvous`.
        store: a store to use instead of ``url``: a :class:`shoal.Store`, or a ``torch.distributed.Store``.
            It must be the same one for all ranks, and must be available until all groups are closed; it is
            not closed here.  Without ``secret`` the ranks agree on a secret in it: anyone who can read the
            store, or its connections, can then connect to them.
        rank: rank of this process; None: set by the launcher, else in order of arrival.
        size: number of processes; None: set by the launcher, else read from the job's record in the store.
        timeout: timeout of the rendezvous in seconds, and default of the group's operations; None:
            ``SHOAL_TIMEOUT`` (300 s).
        secret: the job's secret; None: ``SHOAL_SECRET``, or the file that ``SHOAL_SECRET_FILE`` names; else,
            on one host, a file that only this user can read (``docs/security.md``).
        backend: name of the data channel: "native", "mpi", "nccl", or one given to
            :func:`shoal.register_backend`; None: ``SHOAL_BACKEND`` ("native").
        name: name of the group, for errors and logs.
        concurrency: number of lanes: maximum number of operations of a group in progress at once; None:
            ``SHOAL_CONCURRENCY`` (1).
        algorithm: of reductions and all_gather between hosts: ``"direct"``, ``"doubling"``, ``"halving"``,
            ``"ring"`` or ``"auto"``, the same on all ranks (``docs/algorithms.md``); None:
            ``SHOAL_ALGORITHM`` ("auto"). Other engines than the native one have their own settings.
        host_id: identity of this host; ranks with different values do not share memory.  None:
            ``SHOAL_HOST_ID``, or the identity of the machine.
        job: name of the job; processes with the same name form a group.  With different names, one process
            can be in several worlds at one URL.  None: ``SHOAL_JOB``, or set by the launcher.
        options: options of the backend; native has ``transport`` ("auto", "shm" or "tcp"),
            ``heartbeat_timeout`` (seconds), ``shared_memory_limit`` (bytes) and ``progress_threads`` (number
            of threads that run operations for which no thread waits).  None: ``SHOAL_TRANSPORT`` and so on.

    Returns:
        The group of all processes; a context manager.

    Raises:
        UsageError, ConfigurationError: an argument or an environment variable is invalid.
        RendezvousError: the processes contradict each other; RendezvousTimeout names missing ranks.
        AuthenticationError, VersionMismatch: a process does not belong to this job.
    """
    # Check all arguments before waiting for other processes, and in a group of one too.
    config.check_environment()
    dump_directory()
    config.writable_directory(config.TRACE)
    chosen = default_backend() if backend is None else backend
    factory = backend_factory(chosen)
    check_options(factory, options, f"shoal.init (backend {chosen!r})", _ARGUMENTS)
    tuning = Tuning.chosen(concurrency, algorithm)
    seconds = config.TIMEOUT.get() if timeout is None else checked_seconds("timeout", timeout)
    if url in (None, "env://") and store is None and rank is None:
        refuse_joiner()
    for what, text in (("name", name), ("host_id", host_id)):
        if not isinstance(text, str | None) or text == "":
            raise UsageError(f"{what}={text!r}: expected a str that is not empty")
    if url is None and store is None:
        url = default_url(factory)
    membership = rendezvous(
        url, store=store, rank=rank, size=size, timeout=seconds, secret=secret, host=host_id, job=job
    )
    return world_group(membership, factory, name=name, timeout=seconds, tuning=tuning, options=options)


#: names of the arguments of :func:`init`
_ARGUMENTS = [name for name in signature(init).parameters if name != "options"]


def default_url(factory: BackendFactory) -> str | None:
    """Return the URL of the rendezvous for a backend, if the program names none; None: ``env://``."""
    url: str | None = getattr(factory, "default_url", None)
    return None if names_store(os.environ) else url


def refuse_joiner() -> None:
    """Raise ConfigurationError if, by ``SHOAL_JOIN``, this process is to join a running session."""
    if joins := config.JOIN.get():
        raise ConfigurationError(
            f"SHOAL_JOIN={'auto' if joins == 'auto' else 1}: this process has no rank for shoal.init; it "
            "can join a running session by shoal.elastic.Session(state)"
        )


def world_group(
    membership: Membership,
    factory: BackendFactory,
    *,
    name: str,
    timeout: float,
    tuning: Tuning,
    options: dict[str, Any],
    within: float | None = None,
) -> ProcessGroup:
    """Connect the ranks of ``membership`` by the backend of ``factory``; return the group of all ranks.

    Args:
        timeout: default timeout in seconds of the group's operations.
        within: timeout in seconds for connecting; None: as ``timeout``.
    """
    name = encodable(name)
    spec = GroupSpec(
        name=name,
        ident=world_ident(membership.job, membership.epoch, name),
        rank=membership.rank,
        ranks=tuple(range(membership.size)),
        tuning=tuning,
        options=options,
    )
    seconds = timeout if within is None else within
    world = World.connect(membership, factory, timeout=seconds, options=options)
    return ProcessGroup._in(world, world.links, spec, membership.store, timeout=timeout)
