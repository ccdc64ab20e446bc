"""References to remote objects.

    table = ps.remote(Table, 0.1)          # creates it at "ps"; returns at once
    table.rpc_async().push(grad)           # calls a method; returns a future
    table.to_here()                        # returns a copy

The owner keeps the object until the last reference at any worker is released.  References can be sent in
calls and results: the sender keeps its own until the receiver has registered its hold with the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...common.formatting import describe_error
from ...common.never_compile import never_compile
from ...errors import CallCancelled, CallTimeout, RpcError, UsageError, WaitTimeout
from ...future import Future
from ...streams import DeviceEvents
from ..codec import devices
from ..codec import pickled as codec
from ..connection.directory import Worker
from . import call
from .context import call_timeout, current, default_agent
from .holds import ObjectHold
from .objects import OwnedObject
from .serving import FutureResult, async_execution, deferred

if TYPE_CHECKING:
    from ..agent import Agent
    from ..peer import Peer

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to an object that its owner keeps; returned by :meth:`Peer.remote`.

    ``RRef(value, agent)`` creates a reference to an object of this process.

    Args:
        value: the object.
        agent: the agent that owns it; None: the agent whose call this thread serves, else that of
            :func:`init_rpc`.

    ``timeout`` of its methods is in seconds; None: the timeout of calls; 0: no limit.
    """

    __slots__ = ("__weakref__", "_agent", "_held", "_ident", "_owned", "_owner")

    _agent: Agent
    _held: ObjectHold | None
    _owned: OwnedObject | None

    def __init__(self, value: T, agent: Agent | None = None) -> None:
        agent = default_agent("RRef(value)") if agent is None else agent
        references = agent.references
        self._begin(agent, agent.worker, references.new_ident())
        owned = references.objects.begin(self._ident, "", f"RRef of {type(value).__name__}")
        owned.value.set_result(value)

    @classmethod
    def _to(cls, agent: Agent, owner: Worker, ident: str) -> RRef[Any]:
        """Create a reference of this process to an existing or requested object."""
        made = cls.__new__(cls)
        made._begin(agent, owner, ident)
        return made

    def _begin(self, agent: Agent, owner: Worker, ident: str) -> None:
        self._agent, self._owner, self._ident = agent, owner, ident
        self._owned, self._held = agent.references.begin(owner, ident)

    @never_compile
    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # __init__ failed, or the interpreter is shutting down
            self._agent.references.release_later(self._ident)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        route = codec.current_route()
        if route is None or route.agent is not self._agent:
            raise UsageError(f"{self!r} can only be sent to other workers of its job, in a call or a result")
        codec.note_reference(self)
        return rebuild_reference, (self._owner, self._ident)

    @property
    def ident(self) -> str:
        """Identity of the object, the same at all workers."""
        return self._ident

    @property
    def created(self) -> Future[Any] | None:
        """The call that creates the object, if it was made by this worker."""
        return None if self._held is None else self._held.created

    # -- the object ----------------------------------------------------------------------------

    def to_here(self, timeout: float | None = None) -> T:
        """Return the object at its owner, elsewhere a copy; raise the exception of its creation if it failed.

        Args:
            timeout: seconds; None: the timeout of calls; 0: no limit.
        """
        if self._owned is not None:
            seconds = call_timeout(timeout, math.inf)
            return self._value().wait(None if seconds == math.inf else seconds)
        return self._value(timeout).wait()

    def local_value(self) -> T:
        """Return the object itself, at its owner.

        Raises:
            UsageError: this worker is not the owner.
        """
        if self._owned is None:
            raise UsageError(
                f"worker {self._agent.name!r}: {self!r} is not owned by this worker, and only its owner has "
                "the object itself; to_here() returns a copy"
            )
        return self._value().wait()

    def owner(self) -> Peer:
        """Return the owner of the object, a :class:`Peer`."""
        return self._agent.peer_of(self._owner)

    def owner_name(self) -> str:
        """Return the name of the owner of the object."""
        return self._owner.name

    def is_owner(self) -> bool:
        """Whether this worker owns the object."""
        return self._owned is not None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has created the object, as far as this worker knows."""
        created = self.created
        return created is None or (created.done() and created.exception() is None)

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """Return a proxy whose methods call those of the object and return their results."""
        return _Methods(lambda name, args, kwargs: self._invoke(timeout, name, args, kwargs).wait())

    def rpc_async(self, timeout: float | None = None) -> Any:
        """Return a proxy whose methods call those of the object and return futures."""
        return _Methods(lambda name, args, kwargs: self._invoke(timeout, name, args, kwargs))

    def remote(self, timeout: float | None = None) -> Any:
        """Return a proxy whose methods call those of the object and return references to their results."""
        return _Methods(
            lambda name, args, kwargs: self._agent.peer_of(self._owner, timeout).remote(
                invoke, self, name, args, kwargs
            )
        )

    def __repr__(self) -> str:
        return f"<shoal.rpc.RRef {self._ident} at {self._owner.name!r}>"

    # -- inside --------------------------------------------------------------------------------

    def _value(self, timeout: float | None = None) -> Future[T]:
        """Return a future of the object at its owner, elsewhere of a copy."""
        if self._owned is not None:
            return self._owned.value
        created = self.created
        if timeout is None and created is not None and created.done() and created.exception() is not None:
            return created
        return self._call(_copy, timeout, (self,), {})

    def _invoke(
        self, timeout: float | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        return self._call(invoke, timeout, (self, name, args, kwargs), {})

    def _call(
        self,
        fn: Callable[..., Any],
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mailbox: int = 0,
    ) -> Future[Any]:
        peer = self._agent.peer_of(self._owner, timeout)
        return peer._call(mailbox, fn, args, kwargs, owner=self._owner)


def request_object(
    agent: Agent, owner: Worker, ask: Callable[[str, str], Future[Any]]
) -> tuple[RRef[Any], Future[Any]]:
    """Return a reference to an object that ``owner`` creates, and the call that creates it.

    Args:
        ask: makes the call, given the identity of the object and its first holder; "" is the owner.
    """
    references = agent.references
    ref = RRef._to(agent, owner, references.new_ident())
    holder = ""
    if ref._held is not None:
        ref._held.announced = ref._held.announced_by_creation = True
        holder = agent.worker.incarnation
    try:
        made = ask(ref._ident, holder)
        references.track_creation(ref._ident, ref._held, made)
    except BaseException as error:
        # Nothing was sent, or it was and Ctrl-C has interrupted before the future was stored.
        failed: Future[Any] = Future()
        failed.set_exception(RpcError(f"worker {agent.name!r} could not request it: {describe_error(error)}"))
        references.track_creation(ref._ident, ref._held, failed)
        raise
    return ref, made


class _Methods:
    """A proxy: each attribute is a function that calls the remote method of this name."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name != "__call__":
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)


class Actor:
    """A remote object whose methods run one at a time, per caller in the order of calls.

    Each attribute is a method that returns a :class:`shoal.Future`.  Returned by :meth:`Peer.actor`.
    """

    def __init__(self, ref: RRef[Any], mailbox: int) -> None:
        self._ref = ref
        self._mailbox = mailbox

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        ref = self._ref
        return lambda *args, **kwargs: ref._call(invoke, None, (ref, name, args, kwargs), {}, self._mailbox)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Actor, (self._ref, self._mailbox)

    def __repr__(self) -> str:
        return f"<shoal.rpc.Actor at {self._ref.owner_name()!r}>"


# -- called remotely, at an owner or at a receiver of a reference --------------------------------------


def rebuild_reference(owner: Worker, ident: str) -> RRef[Any]:
    """Rebuild a received reference, and register its hold with the owner."""
    route = codec.current_route()
    assert route is not None  # only a call or a result contains a reference
    agent = route.agent
    ref = RRef._to(agent, owner, ident)
    if ref._held is not None:
        agent.references.confirm(ident, ref._held)
    return ref


def _making(
    ident: str, holder: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    return call.name_of(fn, args)


@call.described_as(_making)
def create(
    ident: str, holder: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Create the object ``ident``; an exception of ``fn`` is raised by each use of the object."""
    made = f"{call.name_of(fn, args)}, for {current().caller!r}"
    owned = current().agent.references.make(ident, holder, made, current().peer)
    try:
        result = fn(*args, **kwargs)
        future = deferred(fn, result)
    except Exception as error:
        owned.value.set_exception(error)
        return None
    except BaseException as error:
        owned.value.set_exception(_creation_error(ident, error))
        raise
    if inspect.iscoroutine(result):
        return _complete_from_coroutine(ident, owned.value, result, devices.handler_events())
    if future is not None:
        before = devices.handler_events()
        if before is not None:
            before.complete(None)  # records the work that the handler has enqueued
        future.add_done_callback(partial(_complete_from_future, owned.value, before))
    else:
        _complete_object(owned.value, result, devices.handler_events())
    return None


def _complete_object(value: Future[Any], result: Any, device: DeviceEvents | None) -> None:
    """Complete ``value``; uses of the object wait for the work that its creation has enqueued on devices.

    Args:
        device: events of the devices of the current streams, on which it was created.
    """
    value._device = device
    value.set_result(result)


async def _complete_from_coroutine(
    ident: str, value: Future[Any], result: Coroutine[Any, Any, Any], device: DeviceEvents | None
) -> None:
    try:
        _complete_object(value, await result, device)
    except Exception as error:
        value.set_exception(error)
    except BaseException as error:  # the call that creates it was cancelled or timed out
        value.set_exception(_creation_error(ident, error))
        raise


def _creation_error(ident: str, error: BaseException) -> RpcError:
    """Return the error for uses of an object whose creation ended with an interrupt, exit or cancellation."""
    words = f"the object {ident} was never made: "
    if isinstance(error, asyncio.CancelledError):
        return CallCancelled(f"{words}{current().caller!r} no longer waits for the call that was to make it")
    return RpcError(f"{words}its making ended with {describe_error(error)}")


def _complete_from_future(value: Future[Any], before: DeviceEvents | None, result: Future[Any]) -> None:
    error = result.exception()
    if error is None:
        events = [each for each in (before, result._device) if each is not None]
        _complete_object(value, result.value(), DeviceEvents.merged(events) if events else None)
    else:
        value.set_exception(error)


@call.described_as(_making)
def create_actor(
    ident: str, holder: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Create the object of an actor; return the mailbox of its calls."""
    made = f"actor {call.name_of(fn, args)}, for {current().caller!r}"
    references, executor = current().agent.references, current().agent.executor
    owned = references.make(ident, holder, made, current().peer)
    result = fn(*args, **kwargs)
    if inspect.iscoroutine(result):
        result.close()
        raise UsageError(f"{call.name_of(fn)} is an async def: an actor must be created by a plain function")
    future = deferred(fn, result)
    _complete_object(
        owned.value, result if future is None else _wait_within_call(future, made), devices.handler_events()
    )
    mailbox = references.objects.mailbox(ident, owned, executor.start_mailbox)
    if not mailbox:
        raise RpcError(f"{made}, was created after its last holder had released it")
    return mailbox


def _wait_within_call(future: Future[T], what: str) -> T:
    """Return the value of a future; raise CallTimeout if the current call times out first."""
    try:
        return future.wait(current().remaining())
    except WaitTimeout:
        if future.done():  # it completed just now, or it failed with WaitTimeout
            return future.value()
        raise CallTimeout(
            f"worker {current().agent.name!r}: {what}, for {current().caller!r}, timed out: a value that it "
            "needs was not available before the call's timeout"
        ) from None


def _method(ref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return f"method {name} of an object"


@call.described_as(_method)
def invoke(ref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the object, at its owner."""
    method = getattr(_wait_within_call(ref._value(), f"method {name} of an object"), name)
    result = method(*args, **kwargs)
    future = deferred(method, result)
    return result if future is None else FutureResult(future)


@call.described_as(lambda ref: "a copy of an object")
@async_execution
def _copy(ref: RRef[Any]) -> Future[Any]:
    return ref._value()
