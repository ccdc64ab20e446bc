"""The device part of futures: events behind which results are usable, and the streams that wait for them.

On a device, work is enqueued on streams and runs later.  A future of such work is complete as soon as
the work is enqueued; it then holds one event for each device (and stream), and whoever uses the
result waits for the events: on the host, or only with its current streams.

What a device must be able to do stands in :class:`StreamRuntime`; :class:`CudaRuntime` does it with
``torch.cuda``.  Runtimes are chosen by device type, and :func:`register_runtime` puts another one in
place (the tests play a deterministic one).

The design is that of "CUDA-aware future for distributed" (pytorch issue 48305).
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .common.containers import tensors
from .errors import UnsupportedOperation

#: Seconds that an event is asked for without a pause, and the pauses after that.
_SPIN, _FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 10e-6, 1e-3

#: Seconds that a runtime is asked to block for at a time: Ctrl-C is seen in between.
_SLICE = 0.1


class StreamRuntime(abc.ABC):
    """The functions that a type of device must offer.  Streams and events are opaque to everyone else."""

    @abc.abstractmethod
    def current_stream(self, device: torch.device) -> Any:
        """The stream on which the calling thread enqueues work for ``device``."""

    @abc.abstractmethod
    def stream_from_pool(self, device: torch.device, high_priority: bool) -> Any:
        """A stream of ``device`` for independent work; streams may be given out again."""

    @abc.abstractmethod
    def use(self, stream: Any) -> Any:
        """A context manager in which ``stream`` is its device's current stream (in this thread)."""

    @abc.abstractmethod
    def record(self, stream: Any) -> Any:
        """A new event that occurs when the work enqueued on ``stream`` until now is done."""

    @abc.abstractmethod
    def wait_event(self, stream: Any, event: Any) -> None:
        """Let work enqueued on ``stream`` from now on run after ``event``; does not block."""

    @abc.abstractmethod
    def query(self, event: Any) -> bool:
        """Whether ``event`` has occurred; never blocks.

        Raises:
            Exception: the device failed before it did.
        """

    def synchronize(self, event: Any, timeout: float | None = None) -> bool:
        """Block the calling thread until ``event`` has occurred; False when ``timeout`` seconds ran out.

        Asks :meth:`query`, at first without a pause, then at growing ones: a device has no way of its own to
        wait for an event only so long.

        Raises:
            Exception: the device failed before it did.
        """
        begin = time.monotonic()
        pause = _FIRST_PAUSE
        while not self.query(event):
            waited = time.monotonic() - begin
            if timeout is not None and waited >= timeout:
                return False
            if waited > _SPIN:
                time.sleep(pause if timeout is None else min(pause, timeout - waited))
                pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    @abc.abstractmethod
    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of ``tensor``, once freed, from reuse until what ``stream`` has now is done."""

    def host_memory(self, bytes: int) -> torch.Tensor:
        """Memory of the host, as ``uint8``, which ``copy_(non_blocking=True)`` copies to and from the device.

        When it is freed while such a copy runs, it is not used for anything else until the copy is done.
        """
        return torch.empty(bytes, dtype=torch.uint8, device="cpu")


class CudaRuntime(StreamRuntime):
    """NVIDIA (and through HIP, AMD) devices, by ``torch.cuda``."""

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def stream_from_pool(self, device: torch.device, high_priority: bool) -> torch.cuda.Stream:
        make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        return make(device, priority=-1 if high_priority else 0)

    def use(self, stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        make: Callable[[], torch.cuda.Event] = torch.cuda.Event
        event = make()
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        query: Callable[[], bool] = event.query
        return query()

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def host_memory(self, bytes: int) -> torch.Tensor:
        return torch.empty(bytes, dtype=torch.uint8, pin_memory=True, device="cpu")


_runtimes: dict[str, StreamRuntime] = {"cuda": CudaRuntime()}


def register_runtime(device_type: str, runtime: StreamRuntime | None) -> None:
    """Use ``runtime`` for devices of ``device_type`` (``None``: none, their tensors are like the CPU's)."""
    if runtime is None:
        _runtimes.pop(device_type, None)
    else:
        _runtimes[device_type] = runtime


def runtime_of(device: torch.device) -> StreamRuntime:
    """The runtime for ``device``.

    Raises:
        UnsupportedOperation: nobody registered one for its type.
    """
    try:
        return _runtimes[device.type]
    except KeyError:
        known = ", ".join(sorted(_runtimes))
        raise UnsupportedOperation(
            f"no stream runtime for device {device}; there is one for: {known}. "
            "shoal.streams.register_runtime adds one"
        ) from None


def device_tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, or in containers in it, on devices that have streams.

    Never raises: the completion of a future must not fail because of its value.
    """
    return (tensor for tensor in tensors(value, tolerant=True) if tensor.device.type in _runtimes)


class DeviceEvents:
    """The events behind which a future's value is usable.

    Give one to a :class:`~shoal.future.Future` to say on which devices its work will be, or at which
    priority its callbacks run.

    An engine calls :meth:`record` with its own streams before it completes the future.  For devices
    without an event by then, one is recorded on the current stream of the completing thread.

    Args:
        devices: with an index each.  Those of the tensors in the value are found without being named.
        high_priority: whether callbacks get streams of high priority.
        check: called when the host has waited for the events, before it uses the value: raises what broke the
            work, for engines whose events occur also when it was cut short.  The results of callbacks have
            it too.
    """

    __slots__ = ("_checks", "_devices", "_high_priority", "_recorded")

    def __init__(
        self,
        devices: Iterable[torch.device] = (),
        *,
        high_priority: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._devices = dict.fromkeys(devices)
        self._high_priority = high_priority
        self._checks: tuple[Callable[[], None], ...] = () if check is None else (check,)
        #: (device, stream, event)
        self._recorded: list[tuple[torch.device, Any, Any]] = []
        for device in self._devices:
            runtime_of(device)

    def record(self, streams: Mapping[torch.device, Any]) -> None:
        """Record an event on each of ``streams``, which hold all the work that the value needs."""
        for device, stream in streams.items():
            self._devices.setdefault(device)
            self._recorded.append((device, stream, runtime_of(device).record(stream)))

    def successor(self) -> DeviceEvents:
        """Events for a value made from this one: the same devices, priority and checks, not recorded yet."""
        result = DeviceEvents(self._devices, high_priority=self._high_priority)
        result._checks = self._checks
        return result

    @staticmethod
    def merged(parts: Iterable[DeviceEvents]) -> DeviceEvents:
        """All events and checks of ``parts``, at high priority if any part has it."""
        result = DeviceEvents()
        for part in parts:
            result._devices.update(part._devices)
            result._recorded.extend(part._recorded)
            result._checks += part._checks
            result._high_priority = result._high_priority or part._high_priority
        return result

    def complete(self, value: object, inputs: object = None) -> None:
        """Record what is not recorded yet and tie the tensors' memory to the streams that work on it.

        Args:
            value: of the future.
            inputs: what else the streams may still read.
        """
        tensors = [*device_tensors(value), *device_tensors(inputs)]
        recorded = {device for device, _, _ in self._recorded}
        needed = [*self._devices, *(tensor.device for tensor in tensors)]
        self.record(
            {device: runtime_of(device).current_stream(device) for device in needed if device not in recorded}
        )
        for device, stream, _ in self._recorded:
            _protect(tensors, device, stream)

    def order(self, value: object) -> None:
        """Make the current streams of the calling thread wait for the events; the host does not.

        Args:
            value: of the future; its memory is kept from reuse while these streams work on it.
        """
        tensors = list(device_tensors(value))
        for device, _, event in self._recorded:
            runtime = runtime_of(device)
            current = runtime.current_stream(device)
            runtime.wait_event(current, event)
            _protect(tensors, device, current)

    def synchronize(self, value: object, timeout: float | None = None) -> bool:
        """Block until the events have occurred; False when ``timeout`` seconds ran out.

        Args:
            value: of the future; its memory is kept from reuse while the current streams work on it.

        Raises:
            Exception: the device, or the work on it, failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        tensors = list(device_tensors(value))
        for device, _, event in self._recorded:
            runtime = runtime_of(device)
            while not runtime.synchronize(event, _slice(deadline)):
                if deadline is not None and time.monotonic() >= deadline:
                    return False
            _protect(tensors, device, runtime.current_stream(device))
        for check in self._checks:
            check()
        return True

    @contextmanager
    def streams_behind(self, value: object, high_priority: bool | None = None) -> Iterator[None]:
        """A context in which each device's current stream is a fresh one that waits for the events.

        Args:
            high_priority: of these streams; None: as was said when this was made.
        """
        tensors = list(device_tensors(value))
        high = self._high_priority if high_priority is None else high_priority
        streams = {device: runtime_of(device).stream_from_pool(device, high) for device in self._devices}
        for device, _, event in self._recorded:
            runtime_of(device).wait_event(streams[device], event)
        for device, stream in streams.items():
            _protect(tensors, device, stream)
        with use_streams(streams):
            yield


def events_behind(value: object, given: DeviceEvents | None, inputs: object) -> DeviceEvents | None:
    """The events for a future that now completes with ``value``; None if no device takes part."""
    if given is None:
        if next(device_tensors(value), None) is None:
            return None
        given = DeviceEvents()
    given.complete(value, inputs)
    return given


def current_streams(devices: Iterable[torch.device]) -> dict[torch.device, Any]:
    """The current streams of the calling thread."""
    return {device: runtime_of(device).current_stream(device) for device in devices}


@contextmanager
def use_streams(streams: Mapping[torch.device, Any]) -> Iterator[None]:
    """A context in which these are their devices' current streams, and the first device is current."""
    with ExitStack() as stack:
        # Entering a stream makes its device current too.
        for device, stream in reversed(list(streams.items())):
            stack.enter_context(runtime_of(device).use(stream))
        yield


def _slice(deadline: float | None) -> float:
    return _SLICE if deadline is None else min(_SLICE, max(0.0, deadline - time.monotonic()))


def _protect(tensors: Iterable[torch.Tensor], device: torch.device, stream: Any) -> None:
    for tensor in tensors:
        if tensor.device == device:
            runtime_of(device).record_stream(tensor, stream)
