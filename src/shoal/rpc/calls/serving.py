"""The callee: decodes a call, runs its function, and sends the reply."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...common.formatting import describe_error, traceback_of
from ...errors import AgentClosed, RpcError, UsageError
from ...future import Future
from ..codec import devices, plain
from ..codec.pickled import EncodedValue, decode, encode
from ..connection.endpoint import Message
from ..connection.function_table import MAX_FUNCTIONS
from ..connection.worker_connection import WorkerConnection
from ..executor import CALLS, Executor
from .call import (
    FAILURE,
    FUNCTION,
    HAS_REFERENCES,
    NUMBER_CONFIRMED,
    CallFailure,
    name_of,
    profiler_is_on,
    profiler_range,
)
from .context import Current, current_call
from .holds import HOLDS

if TYPE_CHECKING:
    from ..agent import Agent

F = TypeVar("F", bound=Callable[..., Any])

_logger = logging.getLogger("shoal")
_DEFERRED = "_shoal_async_execution"


def async_execution(fn: F) -> F:
    """Decorate a function that returns a :class:`shoal.Future`, whose value becomes the reply.

    The handler's thread does not wait for the future.  Methods of objects and functions that create objects
    may be decorated too.  If the function returns anything else, its caller gets a UsageError.
    """
    setattr(fn, _DEFERRED, True)
    return fn


def deferred(fn: Callable[..., Any], result: object) -> Future[Any] | None:
    """Return ``result`` if ``fn`` is marked ``async_execution``, else None.

    Raises UsageError if ``fn`` is marked and did not return a future.
    """
    if not getattr(fn, _DEFERRED, False):
        return None
    if isinstance(result, Future):
        return result
    raise UsageError(
        f"{name_of(fn)} is marked async_execution: expected a shoal.Future, got {type(result).__qualname__}"
    )


class FutureResult:
    """Returned by an internal handler instead of its result: a future of the result."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future


class Service:
    """Serves the calls of one agent.

    Args:
        served: functions of a restricted agent by name; None: it runs any function that it receives.
        handlers: maximum number of calls served at once.
    """

    def __init__(self, agent: Agent, served: Mapping[str, Callable[..., Any]] | None, handlers: int) -> None:
        self._agent = agent
        self._name = agent.name
        self._host = agent.worker.hostname
        self._endpoint = agent.endpoint
        self._connections = agent.connections
        self._served = served or {}
        self.executor = Executor(self._endpoint.post, self.handle, handlers, self._name)

    def handle(self, message: Message, on_streams: bool = False) -> None:
        """Serve one call.

        Args:
            on_streams: whether this thread has current streams of the connection's devices for the call.
        """
        try:
            connection = self._connections.by_number(message.peer)
        except KeyError:  # the connection was lost and discarded long ago: no caller waits
            return
        if connection.devices is not None and not on_streams:
            with devices.handling(connection, message):
                self.handle(message, True)
            return
        served = _ServedCall(self, message, connection)
        try:
            fn, args, kwargs = served.unpack()
            token = current_call.set(Current(self._agent, connection.worker.name, message))
            try:
                if profiler_is_on():
                    with profiler_range(served._name, connection.worker.name, self._name):
                        result = fn(*args, **kwargs)
                else:
                    result = fn(*args, **kwargs)
                if inspect.iscoroutine(result):
                    ended = served.ended = threading.Event()
                    end: Callable[[Any], None] = served.end_task
                    if on_streams:
                        result, end = devices.bind_to_current_streams(connection, result, end)
                    task = self.executor.run_coroutine(result, end)
                    forget = self._endpoint.when(message.announce, task.cancel)
                    task.add_done_callback(lambda _: forget())
                    if message.mailbox != CALLS:
                        ended.wait()  # in an ordered mailbox calls run one at a time
                    return
            finally:
                current_call.reset(token)
            future = result.future if isinstance(result, FutureResult) else deferred(fn, result)
            if future is not None:
                future.add_done_callback(served.end_future)
                return
            del args, kwargs
        except BaseException as error:
            served.fail(error)
        else:
            served.answer(result)

    def refuse(self, message: Message) -> None:
        """Fail a call with AgentClosed because the agent is closing; serve posts and messages about holds."""
        if not message.call or message.mailbox == HOLDS:
            self.handle(message)
            return
        with contextlib.suppress(KeyError):  # as in handle()
            served = _ServedCall(self, message, self._connections.by_number(message.peer))
            served.fail(AgentClosed(f"worker {self._name!r}: its agent was closed before the call began"))


class _ServedCall:
    """One call while it is served."""

    __slots__ = ("_connection", "_flags", "_message", "_name", "_service", "ended")

    def __init__(self, service: Service, message: Message, connection: WorkerConnection) -> None:
        self._service = service
        self._message = message
        self._connection = connection
        self._flags = 0
        self._name = "a call"
        #: if the handler is a coroutine: set when it has ended
        self.ended: threading.Event | None = None

    def unpack(self) -> tuple[Callable[..., Any], Iterable[Any], dict[str, Any]]:
        if self._connection.restricted:
            return self._unpack_plain()
        message, known = self._message, self._connection.received_functions
        head = memoryview(message.head)
        number, comes = FUNCTION.unpack_from(head)
        try:
            value = decode(head[FUNCTION.size :], message.parts, self._connection)
        except Exception as error:
            raise RpcError(
                f"{self._name} from {self._connection.worker.name!r} cannot be rebuilt at "
                f"{self._service._name!r}: {describe_error(error)}"
            ) from error
        if comes:
            fn, args, kwargs = value
            if number < MAX_FUNCTIONS:
                known[number] = fn
                self._flags = NUMBER_CONFIRMED
        elif number in known:
            fn, (args, kwargs) = known[number], value
        else:
            raise RpcError(f"a call names function number {number}, which is unknown here")
        self._name = name_of(fn, args)
        message.describe(self._name)
        return fn, args, kwargs

    def _unpack_plain(self) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        message, served = self._message, self._service._served
        if message.mailbox != CALLS:
            raise UsageError(
                f"{self._service._name!r} has no references or actors on connections with restricted workers"
            )
        name, args, kwargs = plain.decode_call(message.head, message.parts)
        self._name = repr(name)
        message.describe(self._name)
        if name not in served:
            there = ", ".join(map(repr, served)) or "nothing"
            raise UsageError(f"{self._service._name!r} does not serve {name!r}; it serves {there} by name")
        return served[name], args, kwargs

    def answer(self, result: Any) -> None:
        if not self._message.call:
            return
        try:
            where = f"the result of {self._name} at {self._service._name!r}"
            encoded = (
                plain.encode(result, where)
                if self._connection.restricted
                else encode(result, self._connection, where)
            )
        except BaseException as error:
            self.fail(error)
            return
        if self._connection.devices is None:
            self._reply(encoded)
            return
        if encoded.arrives_on_device:
            self._flags |= devices.ARRIVES_ON_DEVICE
        try:
            devices.reply(self._connection, encoded, self._message, partial(self._reply, encoded), self.fail)
        except Exception as failure:
            self.fail(failure)

    def fail(self, error: BaseException) -> None:
        service = self._service
        fatal = isinstance(error, (KeyboardInterrupt, SystemExit))
        # The first frame is that of ``handle``.
        trace = traceback_of(error, error.__traceback__ and error.__traceback__.tb_next)
        if not self._message.call:
            _logger.error(
                "worker %r: %s, which %r posted, raised:\n%s",
                service._name, self._name, self._connection.worker.name, trace,
            )  # fmt: skip
        else:
            told = CallFailure(service._name, os.getpid(), service._host, describe_error(error), trace, fatal)
            words = msgspec.msgpack.encode(told)
            said = EncodedValue(FAILURE.pack(len(words)) + words)
            if not (fatal or self._connection.restricted):
                with contextlib.suppress(BaseException):  # raised by user-defined pickling; the text suffices
                    encoded = encode(error, self._connection, "an exception")
                    if not encoded.device_parts:
                        said = EncodedValue(
                            said.head + encoded.head, encoded.parts, encoded.keep, encoded.references
                        )
            self._reply(said, failed=True)
        if fatal:
            _end_this_process()

    def end_task(self, task: Any) -> None:
        """Reply when an ``async def`` handler has ended."""
        try:
            result = task.result()
        except (CancelledError, asyncio.CancelledError):
            self.fail(RpcError(f"{self._name} was cancelled"))
        except BaseException as error:
            self.fail(error)
        else:
            self.answer(result)
        finally:
            if self.ended is not None:
                self.ended.set()

    def end_future(self, future: Future[Any]) -> None:
        """Reply when the future of an ``async_execution`` handler is complete."""
        try:
            result = future.value()
        except BaseException as error:
            self.fail(error)
        else:
            self.answer(result)

    def _reply(self, encoded: EncodedValue, failed: bool = False) -> None:
        message, service, references = self._message, self._service, encoded.references
        if references:
            service._agent.references.pin_reply(message.peer, message.call, references)
            self._flags |= HAS_REFERENCES
        sent = service._endpoint.post.reply(
            message, encoded.head, encoded.parts, encoded.keep, failed, self._flags
        )
        if references and not sent:
            service._agent.references.unpin(message.peer, message.call)


def _end_this_process() -> None:
    """Interrupt the main thread, as Ctrl-C does; if SIGINT is ignored, terminate the process."""
    main = threading.main_thread().ident
    if main is not None and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.pthread_kill(main, signal.SIGINT)  # a signal also interrupts a blocking system call
    else:
        os.kill(os.getpid(), signal.SIGTERM)
