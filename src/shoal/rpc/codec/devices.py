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
from ..connection.endpoint import Call, Endpoint, Message
from ..connection.worker_connection import WorkerConnection
from ..executor import CALLS
from .pickled import EncodedValue

_logger = logging.getLogger("shoal")

#: flag of a call: its handler's streams have high priority
HIGH_PRIORITY = 1
#: flag of a reply: it has tensors that arrive on devices
ARRIVES_ON_DEVICE = 2
#: seconds between two polls of events: doubled while none has occurred, and longer when polling is slow
_MIN_POLL_INTERVAL_S, _MAX_POLL_INTERVAL_S = 50e-6, 1e-3


class EventWatcher:
    """Polls events of devices in the thread of an endpoint, and calls functions when they have occurred."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._waiting: list[tuple[DeviceEvents, Callable[[Exception | None], None]]] = []
        self._polling = False
        self._closed = False
        #: those for which the endpoint's thread is prepared
        self._prepared: set[torch.device] = set()

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
            begins, self._polling = not self._polling, True
        if begins:
            self._endpoint.after(0.0, partial(self._poll, _MIN_POLL_INTERVAL_S))

    def _poll(self, pause: float) -> None:
        begun = time.monotonic()
        with self._lock:
            asked, self._waiting = self._waiting, []
        left = [each for each in asked if not self._call_if_occurred(*each)]
        with self._lock:
            self._waiting[:0] = left if not self._closed else ()
            self._polling = bool(self._waiting)
            if not self._polling:
                return
        pause = _MIN_POLL_INTERVAL_S if len(left) < len(asked) else min(2 * pause, _MAX_POLL_INTERVAL_S)
        spent = time.monotonic() - begun
        self._endpoint.after(max(pause, 4 * spent), partial(self._poll, pause))

    def _call_if_occurred(self, events: DeviceEvents, fn: Callable[[Exception | None], None]) -> bool:
        failure = None
        try:
            for device in events.devices:
                if device not in self._prepared:
                    runtime_of(device).prepare_thread(device)
                    self._prepared.add(device)
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


def send(
    connection: WorkerConnection,
    mailbox: int,
    encoded: EncodedValue,
    timeout: float | None,
    flags: int,
    description: str = "",
    *,
    one_way: bool = False,
) -> tuple[Call, bool]:
    """Send a call, or a post (``one_way``), that has device tensors, when these have been copied to the host.

    Like every call, this blocks only while too much data for the callee is in flight.

    Args:
        description: text that names the call in errors.

    Returns:
        the call, and whether it was accepted for sending.
    """
    post, sources = connection.agent.endpoint.post, _sources(encoded)
    size = sum(source.numel() for source in sources.values())
    held, room = post.hold(connection.number, mailbox, size, timeout, one_way, description)
    if room is None or (one_way and held.done()):
        return held, False

    def fill(failure: BaseException | None) -> None:
        try:
            if failure is None:
                keep = (room, encoded.keep)
                post.fill(held, mailbox, encoded.head, encoded.parts, keep, one_way, flags)
                return
        except ValueError as error:  # too large for a message
            failure = error
        if one_way:
            _logger.error(
                "a post to %r was not sent, its device failed: %s",
                connection.worker.name,
                describe_error(failure),
            )
        post.give_up(held, f"its device failed before its tensors were copied: {describe_error(failure)}")

    devices = {source.device for source in sources.values()}
    events = DeviceEvents(devices, high_priority=bool(flags & HIGH_PRIORITY))
    try:
        events.complete(None)
        done = _staged(encoded, events)
    except Exception as error:
        fill(error.with_traceback(None))
    else:
        connection.agent.watch.when(done, fill)
    return held, True


def result_events(connection: WorkerConnection, message: Message, high: bool) -> DeviceEvents | None:
    """Return recorded events of the devices that tensors of a reply are copied to; None: no tensors."""
    if not message.flags & ARRIVES_ON_DEVICE:
        return None
    events = DeviceEvents(_map(connection).here, high_priority=high)
    with events.ordered_streams(None):
        events.complete(None)
    return events


def reply(
    connection: WorkerConnection,
    encoded: EncodedValue,
    message: Message,
    send: Callable[[], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Call ``send()`` when all work on this thread's streams is done; if the device failed, ``fail(error)``.

    So the work that a handler has enqueued is done when its caller receives the reply.
    """
    events = DeviceEvents(_map(connection).here, high_priority=bool(message.flags & HIGH_PRIORITY))
    events.complete(None)
    done = _staged(encoded, events)

    def go(failure: Exception | None) -> None:
        if failure is None:
            send()
        else:
            fail(RpcError(f"the device failed before the result was ready: {describe_error(failure)}"))

    connection.agent.watch.when(done, go)


def _staged(encoded: EncodedValue, events: DeviceEvents) -> DeviceEvents:
    """Enqueue, after ``events``, copies of the device tensors to host parts; return their events."""
    parts, keep = list(encoded.parts), list(encoded.keep)
    with events.ordered_streams(None):
        for number, source in _sources(encoded).items():
            buffer = runtime_of(source.device).host_memory(source.numel())
            buffer.copy_(source, non_blocking=True)
            parts[number] = (buffer.data_ptr(), source.numel())
            keep.append(buffer)
        done = events.successor()
        done.complete(None)
    encoded.parts, encoded.keep = parts, keep
    return done


def _sources(encoded: EncodedValue) -> Mapping[int, torch.Tensor]:
    return encoded.device_parts or {}


def _map(connection: WorkerConnection) -> DeviceMap:
    return cast(DeviceMap, connection.devices)


# -- handling -------------------------------------------------------------------------------------


class _DeviceLocal(threading.local):
    #: in the thread of an ordered mailbox: events of the work on devices of the last message
    last: DeviceEvents | None = None
    #: in a handler's thread: the devices that have streams for the handler
    here: tuple[torch.device, ...] = ()


_local = _DeviceLocal()


@contextmanager
def handling(connection: WorkerConnection, message: Message) -> Iterator[None]:
    """A context for one handler, in which each device of the connection's map has a new current stream.

    The work of handlers of an ordered mailbox is in the same order on the devices.
    """
    ordered = message.mailbox != CALLS
    before = [DeviceEvents(_map(connection).here)]
    if ordered and _local.last is not None:
        before.append(_local.last)
    events = DeviceEvents.merged(before)
    with events.ordered_streams(None, bool(message.flags & HIGH_PRIORITY)):
        _local.here = _map(connection).here
        try:
            yield
        finally:
            _local.here = ()
            if ordered:
                _local.last = events.successor()
                _local.last.complete(None)


def handler_events() -> DeviceEvents | None:
    """Return events for the devices of this thread's handler, for objects that it makes; None: no devices."""
    return DeviceEvents(_local.here) if _local.here else None


def bind_to_current_streams(
    connection: WorkerConnection, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]
) -> tuple[Coroutine[Any, Any, Any], Callable[[Any], None]]:
    """Wrap a coroutine and its done callback so that each step runs on the streams that are current now."""
    streams = current_streams(_map(connection).here)

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
