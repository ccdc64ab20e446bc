"""Sending tensors on devices: copies to host memory at the sender, and to a device at the receiver.

A call that holds device tensors takes its place in the queue of the connection at once.  The copies to the
host are enqueued on separate streams, which wait for the caller's current streams.  The message is sent when
the copies are done; no thread blocks meanwhile.  The receiver enqueues the copies to the device while it
unpickles the value, on its current streams: those of the handler, or those of the caller's future.
"""

from __future__ import annotations

import logging
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from ...common.formatting import describe_error
from ...errors import RpcError
from ...streams import DeviceEvents, current_streams, runtime_of, use_streams
from ..connection.device_maps import DeviceMap
from ..connection.line import WorkerConnection
from ..connection.post import Call, Endpoint, Letter
from ..executor import CALLS
from .pickled import EncodedValue

_logger = logging.getLogger("shoal")

#: flag of a call: its handler's streams have high priority
HIGH = 1
#: flag of a reply: it has tensors that arrive on devices
LANDS = 2
#: seconds between two polls of events: doubled while none has occurred, and longer when polling is slow
_MIN_POLL_INTERVAL_S, _MAX_POLL_INTERVAL_S = 50e-6, 1e-3


class EventWatcher:
    """Polls events of devices in the thread of an endpoint, and calls functions when they have occurred."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._waiting: list[tuple[DeviceEvents, Callable[[Exception | None], None]]] = []
        self._asking = False
        self._closed = False

    def close(self) -> None:
        """Discard all functions; the endpoint, which would call them, has ended."""
        with self._lock:
            self._closed = True
            self._waiting.clear()

    def when(self, events: DeviceEvents, fn: Callable[[Exception | None], None]) -> None:
        """Call ``fn(None)`` when the events have occurred, or ``fn(failure)`` when the device has failed.

        ``fn`` must be quick; it runs in the endpoint's thread.
        """
        with self._lock:
            if self._closed:
                return
            self._waiting.append((events, fn))
            begins, self._asking = not self._asking, True
        if begins:
            self._endpoint.after(0.0, partial(self._ask, _MIN_POLL_INTERVAL_S))

    def _ask(self, pause: float) -> None:
        begun = time.monotonic()
        with self._lock:
            asked, self._waiting = self._waiting, []
        left = [each for each in asked if not _call_if_occurred(*each)]
        with self._lock:
            self._waiting[:0] = left if not self._closed else ()
            self._asking = bool(self._waiting)
            if not self._asking:
                return
        pause = _MIN_POLL_INTERVAL_S if len(left) < len(asked) else min(2 * pause, _MAX_POLL_INTERVAL_S)
        spent = time.monotonic() - begun
        self._endpoint.after(max(pause, 4 * spent), partial(self._ask, pause))


def _call_if_occurred(events: DeviceEvents, fn: Callable[[Exception | None], None]) -> bool:
    failure = None
    try:
        if not events.synchronize(None, 0.0):
            return False
    except Exception as error:
        failure = error.with_traceback(None)
    try:
        fn(failure)
    except Exception:
        _logger.exception("a callback after copies from a device raised")
    return True


# -- sending ------------------------------------------------------------------------------------


def request(
    endpoint: Endpoint,
    line: WorkerConnection,
    mailbox: int,
    message: EncodedValue,
    timeout: float | None,
    high: bool,
    shown: str,
    function: int,
) -> Call:
    """Send a call on a connection with a device map.

    Like every call, this blocks only while too much data for the callee is in flight.

    Args:
        shown, function: see ``Post.request``.
    """
    if not message.staged:
        flags = HIGH if high else 0
        call = endpoint.post.request(
            line.number, mailbox, message.head, message.parts, message.keep, timeout, flags, shown, function
        )
    else:
        call, room = endpoint.post.hold(
            line.number, mailbox, _bytes(message), timeout, False, shown, function
        )
        if room is not None:
            _send_held(endpoint, line, call, room, mailbox, message, high, False)
    return call


def landing(line: WorkerConnection, letter: Letter, high: bool) -> DeviceEvents | None:
    """Return recorded events of the devices that tensors of a reply are copied to; None: no tensors."""
    if not letter.flags & LANDS:
        return None
    events = DeviceEvents(_map(line).here, high_priority=high)
    with events.ordered_streams(None):
        events.complete(None)
    return events


def post(
    endpoint: Endpoint, line: WorkerConnection, mailbox: int, message: EncodedValue, timeout: float | None
) -> bool:
    """Send a message without a reply; return whether it was accepted for sending."""
    held, room = endpoint.post.hold(line.number, mailbox, _bytes(message), timeout, one_way=True)
    if room is None or held.done():
        return False
    _send_held(endpoint, line, held, room, mailbox, message, False, True)
    return True


def reply(
    line: WorkerConnection,
    message: EncodedValue,
    letter: Letter,
    send: Callable[[], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Call ``send()`` when all work on this thread's streams is done; if the device failed, ``fail(error)``.

    So the work that a handler has enqueued is done when its caller receives the reply.
    """
    events = DeviceEvents(_map(line).here, high_priority=bool(letter.flags & HIGH))
    events.complete(None)
    done = _staged(message, events)

    def go(failure: Exception | None) -> None:
        if failure is None:
            send()
        else:
            fail(RpcError(f"the device failed before the result was ready: {describe_error(failure)}"))

    if not _call_if_occurred(done, go):
        line.agent.watch.when(done, go)


def _send_held(
    endpoint: Endpoint,
    line: WorkerConnection,
    held: Call,
    room: object,
    mailbox: int,
    message: EncodedValue,
    high: bool,
    one_way: bool,
) -> None:
    """Copy the device tensors to the host, and send the message when that is done."""
    post, flags = endpoint.post, HIGH if high else 0

    def fill(failure: BaseException | None) -> None:
        try:
            if failure is None:
                keep = (room, message.keep)
                post.fill(held, mailbox, message.head, message.parts, keep, one_way, flags)
                return
        except ValueError as error:  # too large for a message
            failure = error
        if one_way:
            _logger.error(
                "a post to %r was not sent, its device failed: %s", line.worker.name, describe_error(failure)
            )
        post.give_up(held, f"its device failed before its tensors were copied: {describe_error(failure)}")

    events = DeviceEvents({source.device for source in _sources(message).values()}, high_priority=high)
    try:
        events.complete(None)
        done = _staged(message, events)
    except Exception as error:
        fill(error.with_traceback(None))
    else:
        line.agent.watch.when(done, fill)


def _staged(message: EncodedValue, events: DeviceEvents) -> DeviceEvents:
    """Enqueue, after ``events``, copies of the device tensors to host parts; return their events."""
    parts, keep = list(message.parts), list(message.keep)
    with events.ordered_streams(None):
        for number, source in _sources(message).items():
            buffer = runtime_of(source.device).host_memory(source.numel())
            buffer.copy_(source, non_blocking=True)
            parts[number] = (buffer.data_ptr(), source.numel())
            keep.append(buffer)
        done = events.successor()
        done.complete(None)
    message.parts, message.keep = parts, keep
    return done


def _sources(message: EncodedValue) -> Mapping[int, torch.Tensor]:
    return message.staged or {}


def _bytes(message: EncodedValue) -> int:
    return sum(source.numel() for source in _sources(message).values())


def _map(line: WorkerConnection) -> DeviceMap:
    return cast(DeviceMap, line.devices)


# -- handling -------------------------------------------------------------------------------------


class _DeviceLocal(threading.local):
    #: in the thread of an ordered mailbox: events of the work on devices of the last message
    last: DeviceEvents | None = None
    #: in a handler's thread: the devices that have streams for the handler
    here: tuple[torch.device, ...] = ()


_local = _DeviceLocal()


@contextmanager
def handling(line: WorkerConnection, letter: Letter) -> Iterator[None]:
    """A context for one handler, in which each device of the connection's map has a new current stream.

    The work of handlers of an ordered mailbox is in the same order on the devices.
    """
    ordered = letter.mailbox != CALLS
    before = [DeviceEvents(_map(line).here)]
    if ordered and _local.last is not None:
        before.append(_local.last)
    events = DeviceEvents.merged(before)
    with events.ordered_streams(None, bool(letter.flags & HIGH)):
        _local.here = _map(line).here
        try:
            yield
        finally:
            _local.here = ()
            if ordered:
                _local.last = events.successor()
                _local.last.complete(None)


def of_handler() -> DeviceEvents | None:
    """Return events for the devices of this thread's handler, for objects that it makes; None: no devices."""
    return DeviceEvents(_local.here) if _local.here else None


def on_current_streams(
    line: WorkerConnection, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]
) -> tuple[Coroutine[Any, Any, Any], Callable[[Any], None]]:
    """Wrap a coroutine and its done callback so that each step runs on the streams that are current now."""
    streams = current_streams(_map(line).here)

    async def run() -> Any:
        return await _steps(coroutine, streams)

    def end(task: Any) -> None:
        with use_streams(streams):
            done(task)

    return run(), end


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Any], streams: dict[torch.device, Any]) -> Generator[Any, Any, Any]:
    step: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        with use_streams(streams):
            try:
                awaited = step()
            except StopIteration as end:
                return end.value
        try:
            step = partial(coroutine.send, (yield awaited))
        except BaseException as error:
            step = partial(coroutine.throw, error)
