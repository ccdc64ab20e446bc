"""``shoal.rpc.join``: makes this process a worker."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from .. import config
from ..common.arguments import checked_count, checked_seconds
from ..common.process_identity import ProcessIdentity
from ..errors import UsageError
from ..group import ProcessGroup
from ..rendezvous.point import RendezvousPoint, open_point
from .agent import Agent
from .connection.device_maps import DeviceMaps
from .connection.directory import checked_name
from .connection.meeting import RankReleases, WorkerMeeting, keys_of

#: default maximum number of handlers that run at once
HANDLERS = 512


def join(
    name: str | None = None,
    *,
    url: str | None = None,
    group: ProcessGroup | None = None,
    store: object = None,
    secret: str | bytes | None = None,
    timeout: float | None = None,
    memory: int | None = None,
    handlers: int = HANDLERS,
    serve: Mapping[str, Callable[..., Any]] | None = None,
    device_maps: DeviceMaps | None = None,
    job: str | None = None,
    host_id: str | None = None,
) -> Agent:
    """Join the workers of a job under a name.

    Workers may join and leave at any time; this does not wait for others.

    Args:
        name: of this worker, unique in the job; None: ``rank0``, ``rank1``, ... by its rank in the job.
        url: of the store that has the directory of workers, as for :func:`shoal.init`.  With ``tcp://`` the
            store must already run.
        group: use the store, secret, interface and ranks of a group of this process.  Every rank of the
            group must join; a graceful ``close`` waits for all of them.
        store: a store, which is not closed by the agent.
        secret: of the job; None: as for :func:`shoal.init`.
        timeout: default timeout of calls in seconds; None: ``SHOAL_RPC_TIMEOUT``.
        memory: maximum bytes of received large parts (over 256 KiB) that wait to be handled, including the
            buffers kept for the next ones; also the maximum lent to workers of this host.  None:
            ``SHOAL_RPC_MEMORY``.
        handlers: maximum number of calls served at once.
        serve: makes a restricted worker, which only serves these functions by name:
            ``peer.call("name", ...)``.  Arguments and results are plain values and tensors; nothing is
            pickled in either direction.  None: others may call any function.
        device_maps: for each callee, a one-to-one map from devices here to devices there:
            ``{"ps": {"cuda:0": "cuda:1"}}``.  Results are mapped back.
        job: name of the job; None: ``SHOAL_JOB``, or the name from the launcher.
        host_id: identity of this host; None: ``SHOAL_HOST_ID``, or that of the machine.

    Raises:
        UsageError, ConfigurationError: an argument or environment variable is invalid, or the name is taken.
    """
    settings = checked_settings(timeout, memory, handlers, serve, device_maps)
    if group is not None:
        if not isinstance(group, ProcessGroup):
            raise UsageError(f"group={group!r}: expected a ProcessGroup from shoal.init")
        if (url, store, secret, job, host_id) != (None,) * 5:
            raise UsageError(
                "group= determines url, store, secret, job and host_id: do not pass these arguments"
            )
        return _join_group(name, group, settings)
    place = open_point(url, store=store, timeout=settings["timeout"], secret=secret, host=host_id, job=job)
    try:
        return join_at(place, _name_or_default(name, place.venue.rank), settings)
    except BaseException:
        place.close()
        raise


def checked_settings(
    timeout: float | None,
    memory: int | None,
    handlers: int,
    serve: Mapping[str, Callable[..., Any]] | None = None,
    device_maps: DeviceMaps | None = None,
) -> dict[str, Any]:
    """Return the settings of an agent, from these arguments of :func:`join` and the environment.

    Raises UsageError or ConfigurationError if one of them is invalid.
    """
    config.check_environment()
    return {
        "timeout": config.RPC_TIMEOUT.get() if timeout is None else checked_seconds("timeout", timeout),
        "memory": config.RPC_MEMORY.get() if memory is None else checked_count("memory", memory),
        "handlers": checked_count("handlers", handlers),
        "heartbeat": config.HEARTBEAT_TIMEOUT.get(),
        "serve": None if serve is None else _checked_serve(serve),
        "device_maps": device_maps,  # checked by the agent, which knows its name
    }


def join_at(
    place: RendezvousPoint,
    name: str,
    settings: dict[str, Any],
    release_store: Callable[[float, Callable[[], bool] | None], None] | None = None,
) -> Agent:
    """Make a worker with an open rendezvous point, which it closes when it is closed.

    Before that, it calls ``release_store`` with a timeout in seconds and the venue's ``others_disconnected``;
    None: it releases the store itself.
    """
    rank = place.venue.rank
    if release_store is None:
        releases = RankReleases(place.store, rank, place.venue.size)
        releases.withdraw()
    leave = releases.release if release_store is None else release_store

    def release(timeout: float) -> None:
        try:
            leave(timeout, place.venue.others_disconnected)
        finally:
            place.close()

    return Agent(
        name, place.job, place.epoch, place.identity, place.host, place.store,
        secret=place.secret(), interface=place.interface(), rank=-1 if rank is None else rank,
        release=release, **settings,
    )  # fmt: skip


def _join_group(name: str | None, group: ProcessGroup, settings: dict[str, Any]) -> Agent:
    membership = group.world.membership
    name = _name_or_default(name, group.rank)
    with _lock:
        count = _joined[group] = _joined.get(group, 0) + 1
    store = group.store.clone()
    world = group.world
    world.enter()
    world.losses_reported = True

    def release(timeout: float) -> None:
        store.close()
        world.exit(timeout)

    identity = ProcessIdentity.current()
    meeting = WorkerMeeting(keys_of(store, "group", count), identity, name, group.rank, group.size, "close")
    try:
        agent = Agent(
            name, membership.job, membership.epoch, identity, membership.host, store,
            secret=membership.secret, interface=membership.interface, rank=group.rank,
            release=release, meeting=meeting, **settings,
        )  # fmt: skip
    except BaseException:
        release(0.5)
        raise
    try:
        meeting.announce_joined()
        return agent
    except BaseException:
        agent.close(0.5, graceful=False)
        raise


#: number of joins per group: agents that close together have the same number
_joined: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _checked_serve(serve: object) -> dict[str, Callable[..., Any]]:
    if isinstance(serve, Mapping) and all(isinstance(k, str) and k and callable(v) for k, v in serve.items()):
        return dict(serve)
    raise UsageError(f"serve={serve!r}: expected functions by the names that callers use")


def _name_or_default(name: str | None, rank: int | None) -> str:
    if name is not None:
        return checked_name(name)
    if rank is None:
        raise UsageError("name=None: this process has no rank in a job, so its worker needs a name")
    return f"rank{rank}"
