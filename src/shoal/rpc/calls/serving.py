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
from typing import Any, TypeVar

import msgspec

from ...common.formatting import describe_error, traceback_of
from ...errors import AgentClosed, RpcError, UsageError
from ...future import Future
from ..codec import devices, plain
from ..codec.pickled import EncodedValue, decode, encode
from ..connection.line import WorkerConnection
from ..connection.links import ConnectionManager
from ..connection.numbering import NONE
from ..connection.post import Endpoint, Letter
from ..executor import CALLS, Executor
from . import profiling
from .call import FAILURE, FUNCTION, LEARNED, PINS, CallFailure, name_of
from .current import Current, enter_call, leave_call
from .holds import HOLDS

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


class Later:
    """Returned by an internal handler instead of its result: a future of the result."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future


class Service:
    """Serves the calls of one agent.

    Args:
        agent: the agent.
        name, pid, host: of the agent, for reports of failures.
        links: the connections.
        served: functions of a restricted agent by name; None: it runs any function that it receives.
    """

    def __init__(
        self, agent: Any, name: str, pid: int, host: str, endpoint: Endpoint, links: ConnectionManager,
        served: Mapping[str, Callable[..., Any]] | None,
    ) -> None:  # fmt: skip
        self._agent = agent
        self._name = name
        self._pid = pid
        self._host = host
        self._endpoint = endpoint
        self._links = links
        self._served = served or {}
        #: set by the agent
        self.executor: Executor

    def handle(self, letter: Letter, on_streams: bool = False) -> None:
        """Serve one call.

        Args:
            on_streams: whether this thread has current streams of the connection's devices for the call.
        """
        try:
            line = self._links.line(letter.peer)
        except KeyError:  # the connection was lost and discarded long ago: no caller waits
            return
        if line.devices is not None and not on_streams:
            with devices.handling(line, letter):
                self.handle(letter, True)
            return
        served = _ServedCall(self, letter, line)
        try:
            fn, args, kwargs = served.unpack()
            token = enter_call(Current(self._agent, line.worker.name, letter))
            try:
                if profiling.is_on():
                    with profiling.span(served._name, line.worker.name, self._name):
                        result = fn(*args, **kwargs)
                else:
                    result = fn(*args, **kwargs)
                if inspect.iscoroutine(result):
                    ended = served.ended = threading.Event()
                    end: Callable[[Any], None] = served.end_task
                    if on_streams:
                        result, end = devices.on_current_streams(line, result, end)
                    task = self.executor.run_coroutine(result, end)
                    forget = self._endpoint.when(letter.announce, task.cancel)
                    task.add_done_callback(lambda _: forget())
                    if letter.mailbox != CALLS:
                        ended.wait()  # in an ordered mailbox calls run one at a time
                    return
            finally:
                leave_call(token)
            future = result.future if isinstance(result, Later) else deferred(fn, result)
            if future is not None:
                future.add_done_callback(served.end_future)
                return
            del args, kwargs
        except BaseException as error:
            served.fail(error)
        else:
            served.answer(result)

    def refuse(self, letter: Letter) -> None:
        """Fail a call with AgentClosed because the agent is closing; serve posts and messages about holds."""
        if not letter.call or letter.mailbox == HOLDS:
            self.handle(letter)
            return
        with contextlib.suppress(KeyError):  # as in handle()
            served = _ServedCall(self, letter, self._links.line(letter.peer))
            served.fail(AgentClosed(f"worker {self._name!r}: its agent was closed before the call began"))


class _ServedCall:
    """One call while it is served."""

    __slots__ = ("_flags", "_letter", "_line", "_name", "_service", "ended")

    def __init__(self, service: Service, letter: Letter, line: WorkerConnection) -> None:
        self._service = service
        self._letter = letter
        self._line = line
        self._flags = 0
        self._name = "a call"
        #: if the handler is a coroutine: set when it has ended
        self.ended: threading.Event | None = None

    def unpack(self) -> tuple[Callable[..., Any], Iterable[Any], dict[str, Any]]:
        if self._line.plain:
            return self._unpack_plain()
        letter, known = self._letter, self._line.received
        head = memoryview(letter.head)
        number, comes = FUNCTION.unpack_from(head)
        try:
            value = decode(head[FUNCTION.size :], letter.parts, self._line)
        except Exception as error:
            raise RpcError(
                f"{self._name} from {self._line.worker.name!r} cannot be rebuilt at {self._service._name!r}: "
                f"{describe_error(error)}"
            ) from error
        if comes:
            fn, args, kwargs = value
            if number != NONE:
                known.learn(number, fn)
                self._flags = LEARNED
        else:
            fn, (args, kwargs) = known.function(number), value
        self._name = name_of(fn, args)
        letter.describe(self._name)
        return fn, args, kwargs

    def _unpack_plain(self) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        letter, served = self._letter, self._service._served
        if letter.mailbox != CALLS:
            raise UsageError(
                f"{self._service._name!r} has no references or actors on connections with restricted workers"
            )
        name, args, kwargs = plain.decode_call(letter.head, letter.parts)
        self._name = repr(name)
        letter.describe(self._name)
        if name not in served:
            there = ", ".join(map(repr, served)) or "nothing"
            raise UsageError(f"{self._service._name!r} does not serve {name!r}; it serves {there} by name")
        return served[name], args, kwargs

    def answer(self, result: Any) -> None:
        if not self._letter.call:
            return
        try:
            where = f"the result of {self._name} at {self._service._name!r}"
            message = plain.encode(result, where) if self._line.plain else encode(result, self._line, where)
        except BaseException as error:
            self.fail(error)
            return
        if self._line.devices is None:
            self._reply(message)
            return
        if message.lands:
            self._flags |= devices.LANDS
        try:
            devices.reply(self._line, message, self._letter, partial(self._reply, message), self.fail)
        except Exception as failure:
            self.fail(failure)

    def fail(self, error: BaseException) -> None:
        service = self._service
        fatal = isinstance(error, (KeyboardInterrupt, SystemExit))
        # The first frame is that of ``handle``.
        trace = traceback_of(error, error.__traceback__ and error.__traceback__.tb_next)
        if not self._letter.call:
            _logger.error(
                "worker %r: %s, which %r posted, raised:\n%s",
                service._name, self._name, self._line.worker.name, trace,
            )  # fmt: skip
        else:
            told = CallFailure(
                service._name, service._pid, service._host, describe_error(error), trace, fatal
            )
            words = msgspec.msgpack.encode(told)
            said = EncodedValue(FAILURE.pack(len(words)) + words)
            if not (fatal or self._line.plain):
                with contextlib.suppress(BaseException):  # raised by user-defined pickling; the text suffices
                    message = encode(error, self._line, "an exception")
                    if not message.staged:
                        said = EncodedValue(
                            said.head + message.head, message.parts, message.keep, message.travellers
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

    def _reply(self, message: EncodedValue, failed: bool = False) -> None:
        letter, service, travellers = self._letter, self._service, message.travellers
        if travellers:
            service._agent.references.pin_reply(letter.peer, letter.call, travellers)
            self._flags |= PINS
        sent = service._endpoint.post.reply(
            letter, message.head, message.parts, message.keep, failed, self._flags
        )
        if travellers and not sent:
            service._agent.references.unpin(letter.peer, letter.call)


def _end_this_process() -> None:
    """Interrupt the main thread, as Ctrl-C does; if SIGINT is ignored, terminate the process."""
    main = threading.main_thread().ident
    if main is not None and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.pthread_kill(main, signal.SIGINT)  # a signal also interrupts a blocking system call
    else:
        os.kill(os.getpid(), signal.SIGTERM)
