"""The functions of torch.distributed.rpc, using the default agent of the process.

    import shoal.rpc as rpc                      # was: import torch.distributed.rpc as rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.shutdown()

Names, arguments and their order are torch's; futures are :class:`shoal.Future`.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch

from .. import config
from ..common.arguments import checked_count
from ..distributed.lifecycle import rendezvous_address
from ..errors import UsageError
from ..future import Future
from ..net import Deadline
from ..rendezvous.launcher_variables import read
from ..rendezvous.membership import open_and_meet
from ..rendezvous.point import RendezvousPoint, checked_request
from ..rendezvous.venue import Request
from ..torch_terms.arguments import CLOSE_TIMEOUT_S
from .agent import Agent
from .calls.context import UNSET, call_timeout, default_agent, state
from .calls.reference import RRef
from .connection.directory import checked_name
from .connection.meeting import WorkerMeeting, keys_of
from .join import HANDLERS, checked_settings, join_at
from .options import BackendType, TensorPipeRpcBackendOptions
from .peer import Peer, WorkerInfo

T = TypeVar("T")

#: number of ``init_rpc`` calls of this process with a ``world_size``
_meetings = itertools.count()


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: TensorPipeRpcBackendOptions | None = None,
) -> None:
    """Make this process a worker and create its default agent, which the functions of this module use.

    Args:
        name: of this worker, unique in the job.
        backend: ignored: there is only one.
        rank: of this process; -1: the rank from the launcher or ``init_method``.
        world_size: number of workers; this waits until all of them have joined.  None: workers may join and
            leave at any time, and this does not wait.
        rpc_backend_options: the rendezvous, the timeout of calls, and device maps.

    With ``tcp://``, rank 0 serves the store unless another process does.  After :func:`shutdown` the same
    workers can call this again.

    Raises:
        UsageError: there already is a default agent, an argument is invalid, or two workers have one name.
        RendezvousError: a worker could not join, or the store was lost.
        RendezvousTimeout: a worker did not join within ``SHOAL_TIMEOUT``.
    """
    options = _checked(backend, rpc_backend_options)
    with state.changing("init_rpc"):
        if (there := state.agent()) is not None:
            raise UsageError(
                f"init_rpc: RPC is already initialized here, as {there.name!r}; call shutdown first"
            )
        timeout = call_timeout(options.rpc_timeout, config.RPC_TIMEOUT.get(), "rpc_timeout")
        handlers = max(HANDLERS, checked_count("num_worker_threads", options.num_worker_threads))
        settings = checked_settings(timeout, None, handlers, device_maps=options.device_maps)
        deadline = Deadline(config.TIMEOUT.get())
        request = _request(options.init_method, rank, world_size, deadline)
        number = cache(lambda: next(_meetings))  # the same if the store is opened again
        gather = partial(_gathered, checked_name(name), world_size, number, deadline)
        place, meeting = open_and_meet(request, gather)
        try:
            state.set(_joined(place, meeting, name, settings, deadline), meeting)
        except BaseException:
            place.close()
            raise


def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    """Close the default agent.  References of this worker, and to its objects, become invalid.

    Args:
        graceful: first wait until all workers of ``init_rpc(world_size=...)`` have called this, and until no
            call is pending.
        timeout: seconds for that; 0: no limit.  The agent is closed even after a timeout.

    Raises:
        UsageError: there is no default agent.
        UnknownWorker: a worker did not call this in time.  WorkerLost: one of them has failed.
    """
    with state.changing("shutdown"):
        agent, meeting = state.agent(), state.meeting
        if agent is None:
            raise UsageError("shutdown: RPC has not been initialized in this process")
        deadline = Deadline(call_timeout(timeout, math.inf))
        try:
            if meeting is not None:
                meeting.leave(agent, deadline, graceful)
        except BaseException:
            graceful = False
            raise
        finally:
            seconds = deadline.remaining() if graceful else min(deadline.remaining(), CLOSE_TIMEOUT_S)
            try:
                agent.close(max(seconds, _MIN_CLOSE_S), graceful=graceful)
            finally:
                state.set(None)


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> T:
    """Run ``func(*args, **kwargs)`` at a worker, and return its result.

    Args:
        to: name or rank of the worker, or the result of :func:`get_worker_info` or ``RRef.owner()``.
        timeout: seconds; 0: no limit; -1: the timeout from ``init_rpc``.

    Raises:
        Exception: the exception of ``func``, or an error of :meth:`Peer.call`.
        UnknownWorker: no worker has joined as ``to``.
    """
    return _peer("rpc_sync", to, func, timeout).call(func, *_args(args), **_kwargs(kwargs)).wait()


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Future[T]:
    """Like :func:`rpc_sync`, but return a :class:`shoal.Future` of the result at once."""
    return _peer("rpc_async", to, func, timeout).call(func, *_args(args), **_kwargs(kwargs))


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> RRef[T]:
    """Create the object ``func(*args, **kwargs)`` at a worker; return a reference to it at once.

    Arguments are those of :func:`rpc_sync`.  An exception of ``func`` is raised by each use of the object.
    """
    return _peer("remote", to, func, timeout).remote(func, *_args(args), **_kwargs(kwargs))


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return name and rank of a worker.

    Args:
        worker_name: None: this worker.

    Raises:
        UnknownWorker: no worker has joined under that name.
    """
    agent = default_agent("get_worker_info")
    return agent.peer(agent.name if worker_name is None else worker_name, timeout=0.0)


def get_rpc_timeout() -> float:
    """Return the default timeout of calls in seconds; 0: no limit."""
    timeout = default_agent("get_rpc_timeout").timeout
    return 0.0 if timeout == math.inf else timeout


def is_available() -> bool:
    """Return True: RPC is part of every build."""
    return True


# -- inside ----------------------------------------------------------------------------------------

#: minimum seconds for closing an agent, whatever the timeout
_MIN_CLOSE_S = 0.5


def _checked(backend: object, options: object) -> TensorPipeRpcBackendOptions:
    if backend is not None and getattr(backend, "name", None) not in BackendType.__members__:
        raise UsageError(f"init_rpc: backend={backend!r}: expected a member of BackendType, or None")
    if options is None:
        return TensorPipeRpcBackendOptions()
    if not isinstance(options, TensorPipeRpcBackendOptions):
        raise UsageError(
            f"init_rpc: rpc_backend_options={options!r}: expected shoal.rpc.TensorPipeRpcBackendOptions"
        )
    return options


def _request(init_method: str, rank: int, world_size: int | None, deadline: Deadline) -> Request:
    size = -1 if world_size is None else world_size
    url, own_rank, own_size = rendezvous_address(init_method, rank, size)
    if own_size is None and own_rank is not None and not (url == "env://" and read(os.environ)):
        # With tcp:// rank 0 serves the store, and the URL requires a size.
        url, own_rank, own_size = rendezvous_address(init_method, rank, own_rank + 1)
    request = checked_request(
        url,
        store=None,
        rank=own_rank,
        size=own_size,
        timeout=deadline.timeout,
        secret=None,
        host=None,
        job=None,
    )
    return replace(request, deadline=deadline)


def _gathered(
    name: str, size: int | None, number: Callable[[], int], deadline: Deadline, place: RendezvousPoint
) -> tuple[RendezvousPoint, WorkerMeeting | None]:
    """Gather the workers of the meeting with this number at ``place``, if their size is fixed."""
    if size is None:
        return place, None
    rank = place.venue.rank
    if rank is None:
        raise UsageError("init_rpc: rank= is missing, and neither the launcher nor init_method sets it")
    store = keys_of(place.store, "meeting", number())
    meeting = WorkerMeeting(store, place.identity, name, rank, size, "shutdown")
    meeting.gather(deadline)
    return place, meeting


def _joined(
    place: RendezvousPoint,
    meeting: WorkerMeeting | None,
    name: str,
    settings: dict[str, Any],
    deadline: Deadline,
) -> Agent:
    if meeting is None:
        return join_at(place, name, settings)
    try:
        agent = join_at(place, name, settings, meeting.release_store)
    except BaseException as error:
        meeting.fail(error)
        raise
    try:
        meeting.join(deadline)
        place.venue.on_complete()
    except BaseException:
        agent.close(_MIN_CLOSE_S, graceful=False)
        raise
    return agent


def _args(args: Sequence[Any] | None) -> Sequence[Any]:
    if isinstance(args, Iterable):
        return tuple(args)
    if args is None:
        return ()
    raise UsageError(f"args={args!r}: expected a tuple or list of arguments; pass a single one as (x,)")


def _kwargs(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if kwargs is None:
        return {}
    if isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs):
        return kwargs
    raise UsageError(f"kwargs={kwargs!r}: expected a dict of arguments by name")


def _peer(operation: str, to: str | int | WorkerInfo, func: object, timeout: float | None) -> Peer:
    agent = default_agent(operation)
    if isinstance(func, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        compiled = getattr(func, "name", type(func).__name__)
        raise UsageError(
            f"{operation}: {compiled} was compiled by TorchScript and cannot be sent: pass the original "
            "Python function, or one that calls the compiled one"
        )
    seconds = call_timeout(timeout, agent.timeout)
    name = to.name if isinstance(to, WorkerInfo) else to
    if type(name) is int and agent is state.agent() and state.meeting is not None:
        names = state.meeting.names
        name = names[name] if 0 <= name < len(names) else name
    return agent.peer(name, timeout=0.0).options(timeout=seconds)
