"""``shoal.rpc.join``: from nothing to a worker that calls others and is called."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .. import config
from ..common.keywords import checked_count, checked_seconds
from ..errors import UsageError
from ..group import ProcessGroup
from ..net import Deadline
from ..rendezvous.host import here
from ..rendezvous.place import RendezvousPoint, open_place
from .agent import Agent
from .connection.device_maps import DeviceMaps
from .connection.directory import checked_name
from .connection.meeting import WorkerMeeting, keys_of

#: how many handlers run at once, unless somebody says otherwise
HANDLERS = 512
#: seconds between looks at whether the others have left the store
_PAUSE = 0.02


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

    Nobody else need be there yet, and workers come and go as they like.

    Args:
        name: of this worker, which no other has; None: ``rank0``, ``rank1``, ... by its rank in the job.
        url: where the workers' names are: as for :func:`shoal.init`.  Of those who come to a ``tcp://`` place
            none starts its store.
        group: take the store, the secret and the interface of a group of this process, and its ranks.  Every
            rank of it joins: a graceful ``close`` waits for all.
        store: the store itself, which stays the caller's.
        secret: the job's; None: as for :func:`shoal.init`.
        timeout: seconds until a call without a timeout of its own fails; None: ``SHOAL_RPC_TIMEOUT``.
        memory: most bytes of large parts (over 256 KiB) that have arrived and wait to be handled, with the
            memory that is kept for the next ones; and most that are lent to workers of this host.  None:
            ``SHOAL_RPC_MEMORY``.
        handlers: how many calls may be served at once.
        serve: makes a restricted worker: functions that others may call by these names,
            ``peer.call("name", ...)``, and nothing else.  Arguments and results are plain values and tensors,
            and nothing that it sends or is sent is a pickle.  None: others may call any function.
        device_maps: for calls to each of these workers, the device there for each device here whose tensors
            they may hold, one to one: ``{"ps": {"cuda:0": "cuda:1"}}``.  Results come back the other way.
        job: name of the job; None: ``SHOAL_JOB``, or as the launcher says.
        host_id: identity of this host; None: ``SHOAL_HOST_ID``, or the machine's own.

    Raises:
        UsageError, ConfigurationError: an argument or variable that cannot be right; a name that is taken.
    """
    settings = checked_settings(timeout, memory, handlers, serve, device_maps)
    if group is not None:
        if not isinstance(group, ProcessGroup):
            raise UsageError(f"group={group!r}: expected what shoal.init gives")
        if (url, store, secret, job, host_id) != (None,) * 5:
            raise UsageError(
                "group= brings its own store, secret, job and host: leave out the other arguments"
            )
        return _of_group(name, group, settings)
    place = open_place(url, store=store, timeout=settings["timeout"], secret=secret, host=host_id, job=job)
    try:
        return at_place(place, _named(name, place.venue.rank), settings)
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
    """The settings of an agent that these arguments of :func:`join` and the environment say.

    Raises:
        UsageError, ConfigurationError: one of them cannot be right.
    """
    config.check()
    return {
        "timeout": config.RPC_TIMEOUT.get() if timeout is None else checked_seconds("timeout", timeout),
        "memory": config.RPC_MEMORY.get() if memory is None else checked_count("memory", memory),
        "handlers": checked_count("handlers", handlers),
        "heartbeat": config.HEARTBEAT_TIMEOUT.get(),
        "serve": None if serve is None else _served(serve),
        "device_maps": device_maps,  # the agent checks them, by its name
    }


def at_place(place: RendezvousPoint, name: str, settings: dict[str, Any]) -> Agent:
    """A worker at an open place, which it closes at its end."""
    rank = place.venue.rank
    return Agent(
        name, place.job, place.epoch, place.here, place.host, place.store, "workers",
        secret=place.secret(), interface=place.interface(), rank=-1 if rank is None else rank,
        release=partial(_leave, place), **settings,
    )  # fmt: skip


def _leave(place: RendezvousPoint, timeout: float) -> None:
    """Close the store; if this process serves it to the others, when they have left it, or time is up."""
    deadline = Deadline(timeout)
    while place.venue.alone is not None and not (place.venue.alone() or deadline.expired):
        time.sleep(_PAUSE)
    place.close()


def _of_group(name: str | None, group: ProcessGroup, settings: dict[str, Any]) -> Agent:
    membership = group.world.membership
    name = _named(name, group.rank)
    with _lock:
        count = _joined[group] = _joined.get(group, 0) + 1
    store = group.store.clone()
    world = group.world
    world.enter()
    world.losses_reported = True

    def release(timeout: float) -> None:
        store.close()
        world.exit(timeout)

    meeting = WorkerMeeting(keys_of(store, "group", count), here(), name, group.rank, group.size, "close")
    try:
        agent = Agent(
            name, membership.job, membership.epoch, here(), membership.host, store, "workers",
            secret=membership.secret, interface=membership.interface, rank=group.rank,
            release=release, meeting=meeting, **settings,
        )  # fmt: skip
    except BaseException:
        release(0.5)
        raise
    try:
        meeting.come()
        return agent
    except BaseException:
        agent.close(0.5, graceful=False)
        raise


#: how often this process has joined on each group: the agents that part are those of the same time
_joined: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _served(serve: object) -> dict[str, Callable[..., Any]]:
    if isinstance(serve, Mapping) and all(isinstance(k, str) and k and callable(v) for k, v in serve.items()):
        return dict(serve)
    raise UsageError(f"serve={serve!r}: expected functions by the names that others call them by")


def _named(name: str | None, rank: int | None) -> str:
    if name is not None:
        return checked_name(name)
    if rank is None:
        raise UsageError("name=None: this process has no rank in a job, so its worker needs a name")
    return f"rank{rank}"
