"""``Peer``: the methods for calling another worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..common.arguments import checked_seconds
from ..errors import AgentClosed, CallTimeout, ShoalError, UsageError, WorkerLost
from ..future import Future
from .calls import call
from .calls.reference import Actor, RRef, create, create_actor, request_object
from .codec import pickled as codec
from .connection.directory import Worker, checked_name
from .executor import CALLS

if TYPE_CHECKING:
    from .agent import Agent

T = TypeVar("T")


class WorkerInfo:
    """Name and rank of a worker, the base class of :class:`Peer`; instances are equal if their names are.

    Attributes:
        name: of the worker.
        id: its rank; -1 if it has none.
    """

    __slots__ = ("id", "name")

    def __init__(self, name: str, id: int = -1) -> None:
        self.name = checked_name(name)
        self.id = id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerInfo) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<shoal.rpc.WorkerInfo {self.name!r}, rank {self.id}>"


class Peer(WorkerInfo):
    """A worker of the job that can be called; returned by :meth:`Agent.peer`.

    Attributes:
        name: of the worker.
        id: its rank in the job; -1 if it has none.
        timeout: of calls, in seconds; infinity: no limit.
        high_priority: whether the streams for tensors on devices have high priority.
    """

    __slots__ = ("_agent", "_words", "high_priority", "timeout")

    def __init__(
        self, agent: Agent, name: str, timeout: float, id: int = -1, high_priority: bool = False
    ) -> None:
        self._agent = agent
        self.name = name
        self.timeout = timeout
        self.id = id
        self.high_priority = high_priority
        #: prefix and suffix for the name of a function, in errors and lists
        self._words = f"worker {agent.name!r}: ", f" at {name!r}"

    def options(self, *, timeout: float | None = None, high_priority: bool | None = None) -> Peer:
        """Return a peer for the same worker with other settings.

        Args:
            timeout: seconds; ``math.inf`` for no limit; None: unchanged.
            high_priority: whether the streams that copy tensors on devices, those of the handler and those of
                the future's callbacks have high priority; None: unchanged.
        """
        seconds = self.timeout if timeout is None else checked_seconds("timeout", timeout)
        high = self.high_priority if high_priority is None else bool(high_priority)
        return Peer(self._agent, self.name, seconds, self.id, high)

    @property
    def caller(self) -> Agent:
        """The agent of this process, which calls the peer."""
        return self._agent

    @overload
    def call(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]: ...

    @overload
    def call(self, fn: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...

    def call(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn(*args, **kwargs)`` at the worker; return a future of its result.

        For a restricted worker, ``fn`` is a name that it serves.

        Tensors in the arguments are read until the future is complete: do not modify them before.  The
        function runs at most once; calls are not retried.

        Raises:
            UsageError: the arguments cannot be sent.

        The future fails with the exception that ``fn`` raises, or with CallTimeout, WorkerLost, CallCancelled
        (after its ``cancel()``) or AgentClosed.
        """
        return self._call(CALLS, fn, args, kwargs)

    def post(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> None:
        """Run ``fn(*args, **kwargs)`` at the worker without a reply; exceptions are logged there.

        Raises:
            UsageError: the arguments cannot be sent.
            WorkerLost: the worker cannot be reached.
            CallTimeout: it could not be reached in time, or did not receive in time.
            AgentClosed: the agent was closed before the call was sent.
        """
        description = self._description(fn, args)
        try:
            connection = self._agent.connection(self.name, self.timeout)
            call.post(connection, CALLS, fn, args, kwargs, self._limit, description)
        except (CallTimeout, WorkerLost):
            if self._agent.closed:
                raise AgentClosed(f"{description} was not sent: the agent is closed") from None
            raise

    def remote(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> RRef[T]:
        """Create the object ``fn(*args, **kwargs)`` at the worker; return a reference to it.

        An exception of ``fn`` is raised by each use of the object.

        Raises:
            UsageError: the arguments cannot be sent.
            WorkerLost: the worker cannot be reached.
            CallTimeout: it could not be reached in time.
        """
        return self._make(create, fn, args, kwargs)[0]

    def actor(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Actor:
        """Create an object at the worker whose methods run one at a time, per caller in the order of calls.

        Raises:
            Exception: the exception of ``fn(*args, **kwargs)``, or an error of :meth:`call`.
        """
        ref, made = self._make(create_actor, fn, args, kwargs)
        return Actor(ref, made.wait())

    @property
    def alive(self) -> bool:
        """Whether the worker is connected, or in the directory and not known to have ended."""
        return self._agent.alive(self.name)

    def __repr__(self) -> str:
        return f"<shoal.rpc.Peer {self.name!r}>"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Peer) and self._agent is not other._agent:
            return False
        return super().__eq__(other)

    __hash__ = WorkerInfo.__hash__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if codec.current_route() is None:
            raise UsageError(f"{self!r} can only be sent to other workers of its job, in a call or a result")
        return _arrived, (self.name, self.timeout, self.id)

    # -- inside --------------------------------------------------------------------------------

    def _make(
        self, how: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[RRef[Any], Future[Any]]:
        agent = self._agent
        owner = agent.connection(self.name, self.timeout).worker
        return request_object(
            agent,
            owner,
            lambda ident, holder: self._call(CALLS, how, (ident, holder, fn, args, kwargs), {}, owner=owner),
        )

    @property
    def _limit(self) -> float | None:
        return None if self.timeout == math.inf else self.timeout

    def _description(self, fn: Callable[..., Any] | str, args: tuple[Any, ...]) -> str:
        if not (callable(fn) or isinstance(fn, str)):
            raise UsageError(f"worker {self._agent.name!r}: {fn!r} cannot be called at {self.name!r}")
        before, after = self._words
        return f"{before}{call.name_of(fn, args) if callable(fn) else repr(fn)}{after}"

    def _call(
        self,
        mailbox: int,
        fn: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        owner: Worker | None = None,
    ) -> Future[Any]:
        """Like :meth:`call`; with ``owner``, only this incarnation of the worker may be called."""
        agent, description = self._agent, self._description(fn, args)
        try:
            connection = agent.connection(self.name, self.timeout, owner)
            how = (mailbox, fn, args, kwargs, self._limit, description, self.high_priority)
            if call.profiler_is_on():
                name = fn if isinstance(fn, str) else call.name_of(fn, args)
                with call.profiler_range(name, agent.name, self.name):
                    return call.request(connection, *how)
            return call.request(connection, *how)
        except UsageError:
            raise
        except ShoalError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def bound_call(self, mailbox: int, fn: Callable[..., Any]) -> Callable[..., Future[Any]]:
        """Return a function that calls ``fn`` in a mailbox, always over the current connection."""
        agent, description = self._agent, self._description(fn, ())
        connection, limit = agent.connection(self.name, self.timeout), self._limit
        return lambda *args: call.request(connection, mailbox, fn, args, {}, limit, description)


def _arrived(name: str, timeout: float, id: int) -> Peer:
    """Rebuild a peer at the worker that receives it."""
    route = codec.current_route()
    assert route is not None  # only a call or a result contains a peer
    return Peer(route.agent, name, timeout, id)
