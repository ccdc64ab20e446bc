"""Another worker, as this one calls it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from ..common.keywords import checked_seconds
from ..errors import AgentClosed, CallTimeout, ShoalError, UsageError, WorkerLost
from ..future import Future
from .calls import call, profiling
from .calls.holds import References
from .calls.reference import Actor, RRef, create, create_actor, new
from .codec import pickled as codec
from .connection.directory import Worker, checked_name
from .connection.line import WorkerConnection
from .connection.post import Endpoint
from .executor import CALLS

T = TypeVar("T")


class LocalWorker(Protocol):
    """This worker, as a peer needs it."""

    name: str
    endpoint: Endpoint
    references: References

    @property
    def closed(self) -> bool: ...

    def line(self, name: str, timeout: float, owner: Worker | None = None) -> WorkerConnection: ...

    def alive(self, name: str) -> bool: ...


class WorkerInfo:
    """Name and rank of a worker; every :class:`Peer` is one, and equal to that of its name.

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
    """Another worker of the job, by its name; made by :meth:`Agent.peer`.

    Attributes:
        name: of the worker.
        id: its rank in the job; -1 if it has none.
        timeout: seconds that a call may take until its reply; infinity: as long as it takes.
        high_priority: of the streams for tensors of devices.
    """

    __slots__ = ("_agent", "_words", "high_priority", "timeout")

    def __init__(
        self, agent: LocalWorker, name: str, timeout: float, id: int = -1, high_priority: bool = False
    ) -> None:
        self._agent = agent
        self.name = name
        self.timeout = timeout
        self.id = id
        self.high_priority = high_priority
        #: around the name of a function, in errors and lists
        self._words = f"worker {agent.name!r}: ", f" at {name!r}"

    def options(self, *, timeout: float | None = None, high_priority: bool | None = None) -> Peer:
        """The same worker, with other settings for the calls that are made through what is returned.

        Args:
            timeout: seconds; ``math.inf`` for no limit; None: as here.
            high_priority: for tensors on devices, whether the streams that copy them, those of the handler
                and those of the future's callbacks have high priority; None: as here.
        """
        seconds = self.timeout if timeout is None else checked_seconds("timeout", timeout)
        high = self.high_priority if high_priority is None else bool(high_priority)
        return Peer(self._agent, self.name, seconds, self.id, high)

    @overload
    def call(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]: ...

    @overload
    def call(self, fn: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...

    def call(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn(*args, **kwargs)`` at the worker; the future of its result.

        A restricted worker is called by the names that it serves.

        The arguments may hold tensors, which are read until the future is complete: leave them alone until
        then.  The function runs at most once, and nothing is tried again.

        Raises:
            UsageError: the arguments cannot be sent.

        The future fails with what ``fn`` raises, or with CallTimeout, WorkerLost, CallCancelled (after its
        ``cancel()``) or AgentClosed.
        """
        return self._call(CALLS, fn, args, kwargs)

    def post(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> None:
        """Run ``fn(*args, **kwargs)`` at the worker and hear nothing of it; what it raises is logged there.

        Raises:
            UsageError: the arguments cannot be sent.
            WorkerLost: the worker cannot be reached.
            CallTimeout: it could not be reached in time, or took nothing.
            AgentClosed: the agent was closed before it took anything.
        """
        shown = self._shown(fn, args)
        try:
            line = self._agent.line(self.name, self.timeout)
            call.post(self._agent.endpoint, line, CALLS, fn, args, kwargs, self._limit, shown)
        except (CallTimeout, WorkerLost):
            if self._agent.closed:
                raise AgentClosed(f"{shown} was not sent: the agent is closed") from None
            raise

    def remote(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> RRef[T]:
        """Make an object at the worker, ``fn(*args, **kwargs)``, which stays there; give a reference to it.

        What ``fn`` raises is raised by whatever uses the object.

        Raises:
            UsageError: the arguments cannot be sent.
            WorkerLost: the worker cannot be reached.
            CallTimeout: it could not be reached in time.
        """
        return self._make(create, fn, args, kwargs)[0]

    def actor(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Actor:
        """Make an object at the worker whose methods run one at a time, those of each caller in its order.

        Raises:
            Exception: what ``fn(*args, **kwargs)`` raises, and as of :meth:`call`.
        """
        ref, made = self._make(create_actor, fn, args, kwargs)
        return Actor(ref, made.wait())

    @property
    def alive(self) -> bool:
        """Whether the worker is there, as far as is known: connected, or listed and not known dead."""
        return self._agent.alive(self.name)

    def __repr__(self) -> str:
        return f"<shoal.rpc.Peer {self.name!r}>"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Peer) and self._agent is not other._agent:
            return False
        return super().__eq__(other)

    __hash__ = WorkerInfo.__hash__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if codec.route() is None:
            raise UsageError(f"{self!r} can only be sent to other workers of its job, in a call or a result")
        return _arrived, (self.name, self.timeout, self.id)

    # -- inside --------------------------------------------------------------------------------

    def _make(
        self, how: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[RRef[Any], Future[Any]]:
        agent = self._agent
        owner = agent.line(self.name, self.timeout).worker
        return new(
            agent,
            owner,
            lambda ident, holder: self._call(CALLS, how, (ident, holder, fn, args, kwargs), {}, owner=owner),
        )

    @property
    def _limit(self) -> float | None:
        return None if self.timeout == math.inf else self.timeout

    def _shown(self, fn: Callable[..., Any] | str, args: tuple[Any, ...]) -> str:
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
        """Like :meth:`call`; with ``owner`` only this incarnation of the worker will do."""
        agent, shown = self._agent, self._shown(fn, args)
        try:
            line = agent.line(self.name, self.timeout, owner)
            how = (mailbox, fn, args, kwargs, self._limit, shown, self.high_priority)
            if profiling.is_on():
                name = fn if isinstance(fn, str) else call.name_of(fn, args)
                with profiling.span(name, agent.name, self.name):
                    return call.request(agent.endpoint, line, *how)
            return call.request(agent.endpoint, line, *how)
        except UsageError:
            raise
        except ShoalError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def over_line(self, mailbox: int, fn: Callable[..., Any]) -> Callable[..., Future[Any]]:
        """What calls ``fn`` in a mailbox over the connection of now and no other one, again and again.

        What is the same each time is found once.
        """
        agent, shown = self._agent, self._shown(fn, ())
        line, limit = agent.line(self.name, self.timeout), self._limit
        return lambda *args: call.request(agent.endpoint, line, mailbox, fn, args, {}, limit, shown)


def _arrived(name: str, timeout: float, id: int) -> Peer:
    """The same worker, as the one that gets this knows it."""
    return Peer(codec.route().agent, name, timeout, id)
