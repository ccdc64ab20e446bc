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
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import msgspec

from ...common.copy_refusal import refuses_copies
from ...common.decoding import MalformedMessage, from_msgpack
from ...common.formatting import describe_error, format_seconds
from ...common.never_compile import never_compile
from ...errors import AgentClosed, CallCancelled, CallTimeout, RemoteError, RpcError, UsageError, WorkerLost
from ...future import Future, pool
from ...streams import DeviceEvents
from ..codec import devices, plain
from ..codec.pickled import EncodedValue, decode, encode
from ..connection.line import WorkerConnection
from ..connection.numbering import NONE
from ..connection.post import Call, CallEnd, Endpoint, Letter
from .leases import LEASE_S

F = TypeVar("F", bound=Callable[..., Any])

#: number of the function, and whether the function is included
FUNCTION = struct.Struct("<IB")
FAILURE = struct.Struct("<I")
#: flag of a reply: the callee knows the number of the call's function now (others: ``codec/devices.py``)
LEARNED = 1
#: flag of a reply: it contains references, which the callee keeps until the caller sends ``unpin``
PINS = 4

#: types of objects that can be found in a module by name
_LASTING = frozenset({FunctionType, type})
#: cached names of called functions: both ends list each call by name
_names: dict[Callable[..., Any], str] = {}
_MAX_NAMES = 4096


class CallFailure(msgspec.Struct):
    """A failure at the callee, as text.

    Attributes:
        worker, pid, host: of the callee.
        error: type and text of the exception.
        traceback: as text.
        fatal: KeyboardInterrupt or SystemExit: it ends the callee, and is not raised at the caller.
    """

    worker: str
    pid: int
    host: str
    error: str
    traceback: str
    fatal: bool


def shown_as(words: Callable[..., str]) -> Callable[[F], F]:
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


def request(
    endpoint: Endpoint,
    line: WorkerConnection,
    mailbox: int,
    fn: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float | None,
    shown: str,
    high_priority: bool = False,
) -> Future[Any]:
    """Call ``fn`` at the other end of ``line``; return a future of its result.

    Args:
        fn: a function, or a name that a restricted worker serves.
        timeout: seconds; None: no limit.
        shown: text that names the call in errors.
        high_priority: whether streams on devices have high priority.

    Raises:
        UsageError: the arguments cannot be sent.
    """
    message, number, ticket = _message(line, fn, args, kwargs, shown)
    try:
        used = -1 if number == NONE else number
        if line.devices is None:
            try:
                call = endpoint.post.request(
                    line.number, mailbox, message.head, message.parts, message.keep, timeout, 0, shown, used
                )
            except ValueError as error:  # too large for a message
                raise UsageError(f"{shown} cannot be sent: {error}") from error
            source = _CallSource(endpoint, line, call, number, shown, timeout)
            future: Future[Any] = Future(source, finish=source.result)
        else:
            call = devices.request(endpoint, line, mailbox, message, timeout, high_priority, shown, used)
            landing = _Landing(endpoint, line, call, number, shown, timeout, high_priority)
            future = Future(landing, finish=landing.result)
    finally:
        line.sent.over(ticket)
    if message.travellers:
        future.add_done_callback(partial(_let_go, endpoint, message.travellers))
    return future


def post(
    endpoint: Endpoint,
    line: WorkerConnection,
    mailbox: int,
    fn: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float | None,
    shown: str,
) -> None:
    """Like :func:`request`, without a reply.

    Raises:
        UsageError: the arguments cannot be sent.
        WorkerLost: the worker or the connection to it is lost.
        CallTimeout: the worker did not receive in time.
    """
    message, _, ticket = _message(line, fn, args, kwargs, shown, post=True)
    try:
        if message.staged:
            sent = devices.post(endpoint, line, mailbox, message, timeout)
        else:
            try:
                sent = endpoint.post.post(
                    line.number, mailbox, message.head, message.parts, message.keep, timeout
                )
            except ValueError as error:  # too large for a message
                raise UsageError(f"{shown} cannot be sent: {error}") from error
    finally:
        line.sent.over(ticket)
    if message.travellers:
        endpoint.keep(LEASE_S, message.travellers)
    if not sent:
        why = endpoint.post.lost(line.number)
        if why is not None:
            why = why or "the connection has ended"
            raise WorkerLost(f"{shown} was not sent: {why}", line.worker.name)
        raise CallTimeout(f"{shown} was not sent: the worker did not receive within the timeout")


def _message(
    line: WorkerConnection,
    fn: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shown: str,
    post: bool = False,
) -> tuple[EncodedValue, int, int]:
    """Encode a call; return it, the number of its function, and a ticket for ``Sent.over`` after sending."""
    if line.plain:
        return plain.encode_call(fn, args, kwargs, shown), NONE, 0
    if isinstance(fn, str):
        raise UsageError(
            f"{shown}: only a restricted worker, join(serve=), is called by name; pass a function"
        )
    number, known, ticket = line.sent.use(fn, post=post)
    try:
        message = encode((args, kwargs) if known else (fn, args, kwargs), line, shown)
        message.head = FUNCTION.pack(number, not known) + message.head
    except BaseException:
        line.sent.over(ticket)
        raise
    return message, number, ticket


def reads_arguments(future: Future[Any]) -> bool:
    """Whether the memory of a call's arguments may still be read (not if it was copied to lent memory)."""
    source = future._source
    return isinstance(source, _CallSource) and source.reads()


@refuses_copies(
    "a call",
    "an operation in progress",
    "Wait for it and copy its value",
)
class _CallSource:
    """The source of a future: one call."""

    __slots__ = ("_call", "_endpoint", "_letters", "_line", "_number", "_shown", "_timeout")

    def __init__(
        self,
        endpoint: Endpoint,
        line: WorkerConnection,
        call: Call,
        number: int,
        shown: str,
        timeout: float | None,
    ) -> None:
        self._endpoint = endpoint
        self._line = line
        self._call = call
        self._number = number
        self._shown = shown
        self._timeout = timeout
        self._letters: list[Letter] = []

    @never_compile
    def __del__(self) -> None:
        if not self._letters:  # the reply was not taken, and may contain references
            self._line.agent.references.unread(self._line, self._call)

    def wait(self, timeout: float | None) -> bool:
        return self._call.wait(timeout)

    def done(self) -> bool:
        return self._call.done()

    def reads(self) -> bool:
        """See :func:`reads_arguments`."""
        return self._call.reads

    def cancel(self) -> bool:
        return self._call.cancel()

    def notify(self, fn: Callable[[], None]) -> None:
        # Not in the dispatcher's thread: ``fn`` may unpickle the value.
        self._endpoint.when(self._call.announce, partial(pool.submit, fn))

    def notify_failure(self, ticket: int) -> bool:
        """Trigger a lasting ticket of the endpoint if the call fails; return whether it already has ended."""
        return self._call.announce_failure(ticket)

    def exception(self) -> BaseException | None:
        failed = self._call.error()
        if failed is None:
            return None
        text = failed.text
        worker = self._line.worker
        if failed.end is CallEnd.TIMEOUT:
            recorder = self._line.agent.recorder
            late = CallTimeout(
                f"{self._shown} had no reply within {format_seconds(self._timeout or 0.0)}: {text}"
                + recorder.words()
            )
            recorder.timed_out(late)
            return late
        if failed.end is CallEnd.CANCELLED:
            return CallCancelled(f"{self._shown} was cancelled")
        if failed.end is CallEnd.CLOSED:
            return AgentClosed(f"{self._shown} ended with the agent of this worker, which was closed")
        if failed.end is CallEnd.UNSENT:
            return RpcError(f"{self._shown} was not sent: {text}")
        if failed.end is CallEnd.REFUSED:
            return RpcError(f"{self._shown} was refused: {text}")
        return WorkerLost(
            f"{self._shown}: the worker (process {worker.pid}) was lost before it replied: {text}",
            worker.name,
        )

    def reply(self) -> Letter:
        """Take the reply, which is possible once, and keep it in case Ctrl-C interrupts :meth:`result`."""
        if not self._letters:
            # A single C call takes and stores the reply, so that Ctrl-C cannot lose it in between.
            self._letters.extend(map(Call.reply, (self._call,)))
        return self._letters[0]

    def result(self) -> Any:
        """Decode the reply: return the value of the call or raise the exception of its function."""
        line, letter = self._line, self.reply()
        if letter.flags & LEARNED and self._number != NONE:
            line.sent.answered(self._number)
        value, error = None, None
        if letter.failed:
            error = failure(letter, line, self._shown)
        else:
            try:
                if line.plain:
                    return plain.decode(letter.head, letter.parts)
                value = decode(letter.head, letter.parts, line)
            except Exception as why:
                error = RpcError(
                    f"{self._shown} has a result that cannot be rebuilt here: {describe_error(why)}"
                )
                error.__cause__ = why
        if letter.flags & PINS:
            line.agent.acknowledge(line, self._call.number)
        if error is not None:
            raise error
        return value


class _Landing(_CallSource):
    """A call on a connection with a device map: tensors of its result may arrive on devices."""

    __slots__ = ("_high_priority",)

    def __init__(
        self,
        endpoint: Endpoint,
        line: WorkerConnection,
        call: Call,
        number: int,
        shown: str,
        timeout: float | None,
        high_priority: bool,
    ) -> None:
        super().__init__(endpoint, line, call, number, shown, timeout)
        self._high_priority = high_priority

    def events(self) -> tuple[DeviceEvents | None, object]:
        """Return events of the devices that the result is copied to."""
        return devices.landing(self._line, self.reply(), self._high_priority), None


def _let_go(endpoint: Endpoint, travellers: Sequence[Any], future: Future[Any]) -> None:
    """Release the references in a call's arguments when it has ended; after a reply the callee holds them."""
    if isinstance(future.exception(), (CallTimeout, CallCancelled)):
        endpoint.keep(LEASE_S, travellers)  # the callee may be receiving them


def failure(letter: Letter, line: WorkerConnection, shown: str) -> BaseException:
    """Return the exception of a failed reply."""
    head = memoryview(letter.head)
    try:
        (length,) = FAILURE.unpack_from(head)
        at = FAILURE.size + length
        told = from_msgpack(head[FAILURE.size : at], CallFailure)
    except (struct.error, MalformedMessage) as why:
        return RpcError(f"{shown} failed, and its error report cannot be read: {describe_error(why)}")
    where = f"{told.worker!r} (process {told.pid} on {told.host})"
    if told.fatal:
        return RemoteError(f"{shown}: {where} ended with {told.error}", told.worker, told.traceback)
    text = f"{shown} raised at {where}: {told.error}; the traceback there:\n{told.traceback}"
    remote = RemoteError(text, told.worker, told.traceback)
    if line.plain or at == len(head):
        return remote
    try:
        error = decode(head[at:], letter.parts, line)
    except Exception as why:
        return RemoteError(
            f"{text}(it cannot be rebuilt here: {describe_error(why)})", told.worker, told.traceback
        )
    # A StopIteration would end the generators that it is raised through; asyncio's futures refuse it too.
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        return remote
    error.__cause__ = remote
    return error
