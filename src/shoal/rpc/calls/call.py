"""The caller's half: a call goes out as one letter, and the thread that waits for its reply decodes it.

The head of a call is the number of its function, whether the function itself comes with it, and what the
codec makes of function (if it comes), arguments and keyword arguments.  The head of a failed reply is what
went wrong in words, and the pickle of the exception, if it has one.  On a connection of a restricted worker
the head of a call is as :mod:`shoal.rpc.codec.plain` makes it, and a failed reply has words only.
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
from ...common.uncompiled import uncompiled
from ...common.wording import in_seconds, in_words
from ...errors import AgentClosed, CallCancelled, CallTimeout, RemoteError, RpcError, UsageError, WorkerLost
from ...future import Future, pool
from ...streams import DeviceEvents
from ..codec import devices, plain
from ..codec.pickled import EncodedValue, decode, encode
from ..connection.line import WorkerConnection
from ..connection.numbering import NONE
from ..connection.post import Call, CallEnd, Endpoint, Letter
from .leases import LEASE

F = TypeVar("F", bound=Callable[..., Any])

#: number of the function, and whether it comes along
FUNCTION = struct.Struct("<IB")
FAILURE = struct.Struct("<I")
#: flag of a reply: the number that came with the call is known from now on (others: ``codec/devices.py``)
LEARNED = 1
#: flag of a reply: the callee keeps references that are in it until it hears that they were taken up, or not
PINS = 4

#: types of what can be found in a module by its name
_LASTING = frozenset({FunctionType, type})
#: names of functions that were called, since each call is listed by its name at both ends
_names: dict[Callable[..., Any], str] = {}
_MOST_NAMES = 4096


class CallFailure(msgspec.Struct):
    """A failure at the callee, in words.

    Attributes:
        worker, pid, host: where.
        error: the exception in a line.
        traceback: as text.
        fatal: an interrupt, or an exit: it ends the callee, and is not raised here.
    """

    worker: str
    pid: int
    host: str
    error: str
    traceback: str
    fatal: bool


def shown_as(words: Callable[..., str]) -> Callable[[F], F]:
    """Decorates a function of this package that others call by other names: errors say ``words(*args)``."""

    def mark(fn: F) -> F:
        fn._shoal_shown = words  # type: ignore[attr-defined]
        return fn

    return mark


def name_of(fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> str:
    """``torch.add``: a function, which is called with ``args``, as its users know it."""
    if type(fn) not in _LASTING:
        return _name(fn, args)
    name = _names.get(fn)
    if name is None:
        name = _name(fn, args)
        # Functions that came by value are others each time.
        lasts = getattr(sys.modules.get(fn.__module__), fn.__qualname__, None) is fn
        if lasts and "_shoal_shown" not in fn.__dict__:
            if len(_names) >= _MOST_NAMES:
                _names.clear()
            _names[fn] = name
    return name


def _name(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    if type(fn) is FunctionType and (words := fn.__dict__.get("_shoal_shown")) is not None:
        return str(words(*args))
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    module = getattr(fn, "__module__", None)
    if module == "torch":
        name = name.removeprefix("_VariableFunctionsClass.")  # where torch.add and its like stand
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
    """Call ``fn`` at the other end of ``line``; the future of its result.

    Args:
        fn: a function, or what a restricted worker serves under this name.
        timeout: seconds; None: as long as it takes.
        shown: the call, for errors.
        high_priority: of streams on devices.

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
            except ValueError as error:  # no letter can hold it
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
    """Like :func:`request`, but nobody hears what becomes of it.

    Raises:
        UsageError: the arguments cannot be sent.
        WorkerLost: the worker or the connection to it is lost.
        CallTimeout: the worker took nothing in time.
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
            except ValueError as error:  # no letter can hold it
                raise UsageError(f"{shown} cannot be sent: {error}") from error
    finally:
        line.sent.over(ticket)
    if message.travellers:
        endpoint.keep(LEASE, message.travellers)
    if not sent:
        why = endpoint.post.lost(line.number)
        if why is not None:
            why = why or "the connection has ended"
            raise WorkerLost(f"{shown} was not sent: {why}", line.worker.name)
        raise CallTimeout(f"{shown} was not sent: it took nothing in time")


def _message(
    line: WorkerConnection,
    fn: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shown: str,
    post: bool = False,
) -> tuple[EncodedValue, int, int]:
    """A call to be sent, the number of its function, and a ticket, which is over when it was sent."""
    if line.plain:
        return plain.encode_call(fn, args, kwargs, shown), NONE, 0
    if isinstance(fn, str):
        raise UsageError(
            f"{shown}: only a restricted worker, join(serve=), is called by names; send a function"
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
    """Whether the memory of a call's arguments may still be read; lent memory takes a copy at once."""
    source = future._source
    return isinstance(source, _CallSource) and source.reads()


@refuses_copies(
    "a call",
    "an operation in progress",
    "Wait for it and copy its value",
)
class _CallSource:
    """A call, as its future sees it."""

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

    @uncompiled
    def __del__(self) -> None:
        if not self._letters:  # nobody has looked at what the reply brings
            self._line.agent.references.unread(self._line, self._call)

    def wait(self, timeout: float | None) -> bool:
        return self._call.wait(timeout)

    def done(self) -> bool:
        return self._call.done()

    def reads(self) -> bool:
        """As of :func:`reads_arguments`."""
        return self._call.reads

    def cancel(self) -> bool:
        return self._call.cancel()

    def notify(self, fn: Callable[[], None]) -> None:
        # Not in the dispatcher itself: the value has to be unpickled first.
        self._endpoint.when(self._call.announce, partial(pool.submit, fn))

    def notify_failure(self, ticket: int) -> bool:
        """Let a lasting ticket of the endpoint be due if the call fails; whether it has ended already."""
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
                f"{self._shown} had no reply within {in_seconds(self._timeout or 0.0)}: {text}"
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
        """The reply, which can be taken once, and is kept for a :meth:`result` that Ctrl-C cuts off."""
        if not self._letters:
            # One call of C takes and keeps it: between two a Ctrl-C would lose it.
            self._letters.extend(map(Call.reply, (self._call,)))
        return self._letters[0]

    def result(self) -> Any:
        """The value of the call, which was answered, or what its function raised."""
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
                error = RpcError(f"{self._shown} has a result that cannot be rebuilt here: {in_words(why)}")
                error.__cause__ = why
        if letter.flags & PINS:
            line.agent.acknowledge(line, self._call.number)
        if error is not None:
            raise error
        return value


class _Landing(_CallSource):
    """A call on a connection with a map of devices, where tensors of its result may arrive."""

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
        """The devices that the result is copied to."""
        return devices.landing(self._line, self.reply(), self._high_priority), None


def _let_go(endpoint: Endpoint, travellers: Sequence[Any], future: Future[Any]) -> None:
    """A call has ended that took references along, which its callee holds if there is a reply."""
    if isinstance(future.exception(), (CallTimeout, CallCancelled)):
        endpoint.keep(LEASE, travellers)  # it may be taking them up just now


def failure(letter: Letter, line: WorkerConnection, shown: str) -> BaseException:
    """The exception that a failed reply brings."""
    head = memoryview(letter.head)
    try:
        (length,) = FAILURE.unpack_from(head)
        at = FAILURE.size + length
        told = from_msgpack(head[FAILURE.size : at], CallFailure)
    except (struct.error, MalformedMessage) as why:
        return RpcError(f"{shown} failed, and what came of that cannot be read: {in_words(why)}")
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
        return RemoteError(f"{text}(it cannot be rebuilt here: {in_words(why)})", told.worker, told.traceback)
    # A StopIteration would end the generators that it passes through, as asyncio's futures refuse it for.
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        return remote
    error.__cause__ = remote
    return error
