"""The caller: sends a call as one message; the thread that waits for the reply decodes it.

The head of a call is the number of its function, whether the function is included, and the encoded function
(if included), arguments and keyword arguments.  The head of a failed reply is a :class:`CallFailure` and, if
the exception can be pickled, its pickle.  On a connection with a restricted worker the head of a call is
encoded by :mod:`shoal.rpc.codec.plain`, and a failed reply has no pickle.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import msgspec
from torch.autograd import profiler

from ...common.copy_refusal import refuses_copies
from ...common.decoding import MalformedMessage, from_msgpack
from ...common.formatting import describe_error, format_seconds
from ...common.never_compile import never_compile
from ...errors import AgentClosed, CallCancelled, CallTimeout, RemoteError, RpcError, UsageError, WorkerLost
from ...future import Future, pool
from ...streams import DeviceEvents
from ..codec import devices, plain
from ..codec.pickled import EncodedValue, decode, encode
from ..connection.endpoint import Call, CallEnd, Endpoint, Message
from ..connection.function_table import NO_NUMBER
from ..connection.worker_connection import WorkerConnection
from .objects import LEASE_S

F = TypeVar("F", bound=Callable[..., Any])

#: number of the function, and whether the function is included
FUNCTION = struct.Struct("<IB")
FAILURE = struct.Struct("<I")
#: flag of a reply: the callee knows the number of the call's function now (others: ``codec/devices.py``)
NUMBER_CONFIRMED = 1
#: flag of a reply: it contains references, which the callee keeps until the caller sends ``unpin``
HAS_REFERENCES = 4

#: types of objects that can be found in a module by name
_LASTING = frozenset({FunctionType, type})
#: cached names of called functions: both ends list each call by name
_names: dict[Callable[..., Any], str] = {}
_MAX_NAMES = 4096


class CallFailure(msgspec.Struct):
    """A failure at the callee, as text.

    ``fatal``: KeyboardInterrupt or SystemExit, which ends the callee and is not raised at the caller.
    """

    worker: str
    pid: int
    host: str
    error: str
    traceback: str
    fatal: bool


def described_as(words: Callable[..., str]) -> Callable[[F], F]:
    """Decorate an internal function that is called remotely: errors name its calls ``words(*args)``."""

    def mark(fn: F) -> F:
        fn._shoal_shown = words  # type: ignore[attr-defined]
        return fn

    return mark


def name_of(fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> str:
    """Return the public name, such as ``torch.add``, of a function that is called with ``args``."""
    if type(fn) not in _LASTING:
        return _name(fn, args)
    name = _names.get(fn)
    if name is None:
        name = _name(fn, args)
        # A function pickled by value is a new object each time: do not cache it.
        lasts = getattr(sys.modules.get(fn.__module__), fn.__qualname__, None) is fn
        if lasts and "_shoal_shown" not in fn.__dict__:
            if len(_names) >= _MAX_NAMES:
                _names.clear()
            _names[fn] = name
    return name


def _name(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    if type(fn) is FunctionType and (words := fn.__dict__.get("_shoal_shown")) is not None:
        return str(words(*args))
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    module = getattr(fn, "__module__", None)
    if module == "torch":
        name = name.removeprefix("_VariableFunctionsClass.")  # the class of torch.add and similar functions
    return f"{module}.{name}" if module and module not in ("builtins", "__main__", "__mp_main__") else name


def profiler_is_on() -> bool:
    """Whether torch's profiler is running in this process."""
    return profiler._is_profiler_enabled


def profiler_range(name: str, caller: str, callee: str) -> AbstractContextManager[Any]:
    """Return a range of torch's profiler for a call or a handler."""
    return profiler.record_function(f"rpc:{name}({caller}->{callee})")


def request(
    connection: WorkerConnection,
    mailbox: int,
    fn: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float | None,
    description: str,
    high_priority: bool = False,
) -> Future[Any]:
    """Call ``fn`` at the other end of ``connection``; return a future of its result.

    Args:
        fn: a function, or a name that a restricted worker serves.
        timeout: seconds; None: no limit.
        description: text that names the call in errors.
        high_priority: whether streams on devices have high priority.

    Raises:
        UsageError: the arguments cannot be sent.
    """
    encoded, number = _encode_call(connection, fn, args, kwargs, description)
    endpoint, on_devices = connection.agent.endpoint, connection.devices is not None
    flags = devices.HIGH_PRIORITY if high_priority and on_devices else 0
    if encoded.device_parts:
        call, _ = devices.send(connection, mailbox, encoded, timeout, flags, description)
    else:
        try:
            call = endpoint.post.request(
                connection.number, mailbox, encoded.head, encoded.parts, encoded.keep, timeout, flags,
                description,
            )  # fmt: skip
        except ValueError as error:  # too large for a message
            raise UsageError(f"{description} cannot be sent: {error}") from error
    kind = _DeviceCallSource if on_devices else _CallSource
    source = kind(connection, call, number, description, timeout, high_priority)
    future: Future[Any] = Future(source, finish=source.result)
    if encoded.references:
        future.add_done_callback(partial(_release_references, endpoint, encoded.references))
    return future


def post(
    connection: WorkerConnection,
    mailbox: int,
    fn: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float | None,
    description: str,
) -> None:
    """Like :func:`request`, without a reply.

    Raises:
        UsageError: the arguments cannot be sent.
        WorkerLost: the worker or the connection to it is lost.
        CallTimeout: the worker did not receive in time.
    """
    encoded, _ = _encode_call(connection, fn, args, kwargs, description, post=True)
    endpoint = connection.agent.endpoint
    if encoded.device_parts:
        _, sent = devices.send(connection, mailbox, encoded, timeout, 0, one_way=True)
    else:
        try:
            sent = endpoint.post.post(
                connection.number, mailbox, encoded.head, encoded.parts, encoded.keep, timeout
            )
        except ValueError as error:  # too large for a message
            raise UsageError(f"{description} cannot be sent: {error}") from error
    if encoded.references:
        endpoint.keep(LEASE_S, encoded.references)
    if sent:
        return
    why = endpoint.post.lost(connection.number)
    if why is not None:
        why = why or "the connection has ended"
        raise WorkerLost(f"{description} was not sent: {why}", connection.worker.name)
    raise CallTimeout(f"{description} was not sent: the worker did not receive within the timeout")


def _encode_call(
    connection: WorkerConnection,
    fn: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    description: str,
    post: bool = False,
) -> tuple[EncodedValue, int]:
    """Encode a call; return it and the number of its function."""
    if connection.restricted:
        return plain.encode_call(fn, args, kwargs, description), NO_NUMBER
    if isinstance(fn, str):
        raise UsageError(
            f"{description}: only a restricted worker, join(serve=), is called by name; pass a function"
        )
    number, known = connection.sent_functions.number_of(fn, post=post)
    encoded = encode((args, kwargs) if known else (fn, args, kwargs), connection, description)
    encoded.head = FUNCTION.pack(number, not known) + encoded.head
    return encoded, number


def reads_arguments(future: Future[Any]) -> bool:
    """Whether the memory of a call's arguments may still be read (not if it was copied to lent memory)."""
    source = future._source
    return isinstance(source, _CallSource) and source._call.reads


@refuses_copies("a call", "an operation in progress", "Wait for it and copy its value")
class _CallSource:
    """The source of a future: one call."""

    __slots__ = (
        "_call", "_connection", "_description", "_high_priority", "_messages", "_number", "_timeout"
    )  # fmt: skip

    def __init__(
        self, connection: WorkerConnection, call: Call, number: int, description: str,
        timeout: float | None, high_priority: bool,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._call = call
        self._number = number
        self._description = description
        self._timeout = timeout
        self._high_priority = high_priority
        self._messages: list[Message] = []

    @never_compile
    def __del__(self) -> None:
        if not self._messages:  # the reply was not taken, and may contain references
            self._connection.agent.references.unread(self._connection, self._call)

    def wait(self, timeout: float | None) -> bool:
        return self._call.wait(timeout)

    def done(self) -> bool:
        return self._call.done()

    def cancel(self) -> bool:
        return self._call.cancel()

    def notify(self, fn: Callable[[], None]) -> None:
        # Not in the dispatcher's thread: ``fn`` may unpickle the value.
        self._connection.agent.endpoint.when(self._call.announce, partial(pool.submit, fn))

    def notify_failure(self, ticket: int) -> bool:
        """Trigger a lasting ticket of the endpoint if the call fails; return whether it already has ended."""
        return self._call.announce_failure(ticket)

    def exception(self) -> BaseException | None:
        failed = self._call.error()
        if failed is None:
            return None
        what, text, worker = self._description, failed.text, self._connection.worker
        if failed.end is CallEnd.TIMEOUT:
            recorder = self._connection.agent.recorder
            within = format_seconds(self._timeout or 0.0)
            late = CallTimeout(f"{what} had no reply within {within}: {text}{recorder.summary()}")
            recorder.timed_out(late)
            return late
        if failed.end is CallEnd.CANCELLED:
            return CallCancelled(f"{what} was cancelled")
        if failed.end is CallEnd.CLOSED:
            return AgentClosed(f"{what} ended with the agent of this worker, which was closed")
        if failed.end is CallEnd.UNSENT:
            return RpcError(f"{what} was not sent: {text}")
        if failed.end is CallEnd.REFUSED:
            return RpcError(f"{what} was refused: {text}")
        return WorkerLost(
            f"{what}: the worker (process {worker.pid}) was lost before it replied: {text}", worker.name
        )

    def reply(self) -> Message:
        """Take the reply, which is possible once, and keep it in case Ctrl-C interrupts :meth:`result`."""
        if not self._messages:
            # A single C call takes and stores the reply, so that Ctrl-C cannot lose it in between.
            self._messages.extend(map(Call.reply, (self._call,)))
        return self._messages[0]

    def result(self) -> Any:
        """Decode the reply: return the value of the call or raise the exception of its function."""
        connection, message = self._connection, self.reply()
        if message.flags & NUMBER_CONFIRMED and self._number != NO_NUMBER:
            connection.sent_functions.confirm(self._number)
        value, error = None, None
        if message.failed:
            error = failure(message, connection, self._description)
        else:
            try:
                if connection.restricted:
                    return plain.decode(message.head, message.parts)
                value = decode(message.head, message.parts, connection)
            except Exception as why:
                error = RpcError(
                    f"{self._description} has a result that cannot be rebuilt here: {describe_error(why)}"
                )
                error.__cause__ = why
        if message.flags & HAS_REFERENCES:
            connection.agent.acknowledge(connection, self._call.number)
        if error is not None:
            raise error
        return value


class _DeviceCallSource(_CallSource):
    """A call on a connection with a device map: tensors of its result may arrive on devices."""

    __slots__ = ()

    def events(self) -> tuple[DeviceEvents | None, object]:
        """Return events of the devices that the result is copied to."""
        return devices.result_events(self._connection, self.reply(), self._high_priority), None


def _release_references(endpoint: Endpoint, references: Sequence[Any], future: Future[Any]) -> None:
    """Release the references in a call's arguments when it has ended; after a reply the callee holds them."""
    if isinstance(future.exception(), (CallTimeout, CallCancelled)):
        endpoint.keep(LEASE_S, references)  # the callee may be receiving them


def failure(message: Message, connection: WorkerConnection, description: str) -> BaseException:
    """Return the exception of a failed reply."""
    head = memoryview(message.head)
    try:
        (length,) = FAILURE.unpack_from(head)
        at = FAILURE.size + length
        told = from_msgpack(head[FAILURE.size : at], CallFailure)
    except (struct.error, MalformedMessage) as why:
        return RpcError(f"{description} failed, and its error report cannot be read: {describe_error(why)}")
    where = f"{told.worker!r} (process {told.pid} on {told.host})"
    if told.fatal:
        return RemoteError(f"{description}: {where} ended with {told.error}", told.worker, told.traceback)
    text = f"{description} raised at {where}: {told.error}; the traceback there:\n{told.traceback}"
    remote = RemoteError(text, told.worker, told.traceback)
    if connection.restricted or at == len(head):
        return remote
    try:
        error = decode(head[at:], message.parts, connection)
    except Exception as why:
        return RemoteError(
            f"{text}(it cannot be rebuilt here: {describe_error(why)})", told.worker, told.traceback
        )
    # A StopIteration would end the generators that it is raised through; asyncio's futures refuse it too.
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        return remote
    error.__cause__ = remote
    return error
