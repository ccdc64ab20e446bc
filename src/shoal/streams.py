"""Device support of futures: events after which results can be used, and streams that wait for them.

On a device, work is enqueued on streams and runs later.  A future of such work is complete as soon as the
work is enqueued; it then has one event for each device (and stream).  A user of the result waits for the
events, on the host or only on the current streams.

:class:`StreamRuntime` is the interface to a device; :class:`CudaRuntime` implements it with ``torch.cuda``.
Runtimes are chosen by device type, and can be replaced by :func:`register_runtime`, for example in tests.

The design is that of "CUDA-aware future for distributed" (pytorch issue 48305).
"""

from __future__ import annotations

import abc
import ctypes
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .common.containers import tensors
from .common.torch_features import cuda_runtime_library
from .errors import UnsupportedOperation, UsageError

#: seconds of polling an event without a pause, and then the first and the longest pause
_SPIN, _FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 10e-6, 1e-3

#: maximum time in seconds of one blocking wait; Ctrl-C is handled between two waits
_SLICE_S = 0.1

_logger = logging.getLogger("shoal")

#: ``cudaStreamCaptureModeRelaxed``
_CAPTURE_MODE_RELAXED = 2


class StreamRuntime(abc.ABC):
    """The interface of a device type.  Streams and events are opaque to its callers."""

    @abc.abstractmethod
    def devices(self) -> Iterable[torch.device]:
        """The devices that this process has used, and possibly more; never initialises one."""

    @abc.abstractmethod
    def current_stream(self, device: torch.device) -> Any:
        """The stream on which the calling thread enqueues work for ``device``."""

    @abc.abstractmethod
    def stream_from_pool(self, device: torch.device, high_priority: bool) -> Any:
        """A stream of ``device`` for independent work; streams may be reused."""

    @abc.abstractmethod
    def use(self, stream: Any) -> Any:
        """A context manager in which ``stream`` is the current stream of its device in this thread."""

    @abc.abstractmethod
    def record(self, stream: Any) -> Any:
        """Return a new event that occurs when all work enqueued on ``stream`` so far is done."""

    @abc.abstractmethod
    def wait_event(self, stream: Any, event: Any) -> None:
        """Make work enqueued on ``stream`` from now on run after ``event``; does not block."""

    @abc.abstractmethod
    def query(self, event: Any) -> bool:
        """Whether ``event`` has occurred; never blocks.

        Raises:
            Exception: the device failed before the event.
        """

    def synchronize(self, event: Any, timeout: float | None = None) -> bool:
        """Block the calling thread until ``event`` has occurred; return False after ``timeout`` seconds.

        Polls :meth:`query`, at first without a pause, then with growing pauses, because devices cannot wait
        for an event with a timeout.

        Raises:
            Exception: the device failed before the event.
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

    def handle(self, stream: Any) -> int:
        """The native handle of ``stream``, such as a ``cudaStream_t``, for libraries that take one.

        Raises:
            UnsupportedOperation: the device has no such handles (the default).
        """
        raise UnsupportedOperation(f"{type(self).__name__} has no native handles of streams")

    def capturing(self, device: torch.device) -> bool:
        """Whether the current stream of ``device`` records its work into a graph instead of running it."""
        return False

    def prepare_thread(self, device: torch.device) -> None:
        """Make ``device`` current in this thread, which must not disturb captures of other threads."""
        return

    @abc.abstractmethod
    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Prevent reuse of the memory of ``tensor``, once freed, until the work now on ``stream`` is done."""

    def host_memory(self, bytes: int) -> torch.Tensor:
        """Host memory (``uint8``) for ``copy_(non_blocking=True)`` to and from the device.

        If it is freed while such a copy runs, it is not reused until the copy is done.
        """
        return torch.empty(bytes, dtype=torch.uint8, device="cpu")


class CudaRuntime(StreamRuntime):
    """NVIDIA (and, with HIP, AMD) devices, by ``torch.cuda``."""

    def devices(self) -> Iterable[torch.device]:
        is_initialized: Callable[[], bool] = torch.cuda.is_initialized
        count = torch.cuda.device_count() if is_initialized() else 0
        return [torch.device("cuda", index) for index in range(count)]

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def stream_from_pool(self, device: torch.device, high_priority: bool) -> torch.cuda.Stream:
        make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        return make(device, priority=-1 if high_priority else 0)

    @contextmanager
    def use(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # torch.cuda.stream alone ends with the thread's first device current, which takes memory there.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

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

    def handle(self, stream: torch.cuda.Stream) -> int:
        handle: int = stream.cuda_stream
        return handle

    def capturing(self, device: torch.device) -> bool:
        if device.index == torch.cuda.current_device():  # entering it again takes longer
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def prepare_thread(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        # Otherwise queries of events in this thread invalidate captures of all others.  Torch has loaded the
        # library already, so that its name suffices.
        if (library := cuda_runtime_library()) is None:
            return
        try:
            runtime = ctypes.CDLL(library)
            mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
            code = runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            problem = f"cudaThreadExchangeStreamCaptureMode: error {code}" if code else ""
        except (OSError, AttributeError) as error:
            problem = str(error)
        if problem:
            _logger.warning("captures of CUDA graphs may fail while operations run: %s", problem)

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def host_memory(self, bytes: int) -> torch.Tensor:
        return torch.empty(bytes, dtype=torch.uint8, pin_memory=True, device="cpu")


_runtimes: dict[str, StreamRuntime] = {"cuda": CudaRuntime()}


def register_runtime(device_type: str, runtime: StreamRuntime | None) -> None:
    """Use ``runtime`` for devices of ``device_type`` (``None``: treat their tensors like CPU tensors)."""
    if runtime is None:
        _runtimes.pop(device_type, None)
    else:
        _runtimes[device_type] = runtime


def runtime_of(device: torch.device) -> StreamRuntime:
    """The runtime for ``device``.

    Raises:
        UnsupportedOperation: none is registered for its type.
    """
    try:
        return _runtimes[device.type]
    except KeyError:
        known = ", ".join(sorted(_runtimes))
        raise UnsupportedOperation(
            f"no stream runtime for device {device}; runtimes are registered for: {known}. "
            "Add one by shoal.streams.register_runtime"
        ) from None


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is enqueued on streams."""
    return device.type in _runtimes


def device_tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, and in containers in it, on devices that have streams.

    Never raises: the completion of a future must not fail because of its value.
    """
    return (tensor for tensor in tensors(value, tolerant=True) if tensor.device.type in _runtimes)


class DeviceEvents:
    """The events after which a future's value can be used.

    Pass it to a :class:`~shoal.future.Future` to set devices of the work, or the priority of callbacks.

    An engine calls :meth:`record` with its own streams before it completes the future.  For devices without
    an event at completion, one is recorded on the current stream of the completing thread.

    Args:
        devices: the devices, with an index each.  Devices of tensors in the value are added automatically.
        high_priority: run callbacks on streams with high priority.
        check: for engines with events that also occur after a failure, or never.  ``check(timeout)`` waits
            for up to ``timeout`` seconds, returns whether the work is known to have succeeded, and raises its
            error; with 0 it only looks.  Called while the host waits for the events, and before it or a
            stream uses the value.  It applies to the results of callbacks too.
        captured: the work is captured into a graph, so only streams of that capture can wait for it.
    """

    __slots__ = ("_captured", "_checks", "_devices", "_high_priority", "_recorded")

    def __init__(
        self,
        devices: Iterable[torch.device] = (),
        *,
        high_priority: bool = False,
        check: Callable[[float], bool] | None = None,
        captured: bool = False,
    ) -> None:
        self._captured = captured
        self._devices = dict.fromkeys(devices)
        self._high_priority = high_priority
        self._checks: tuple[Callable[[float], bool], ...] = () if check is None else (check,)
        #: (device, stream, event)
        self._recorded: list[tuple[torch.device, Any, Any]] = []
        for device in self._devices:
            runtime_of(device)

    @property
    def devices(self) -> Iterable[torch.device]:
        """The devices of the work."""
        return tuple(self._devices)

    def record(self, streams: Mapping[torch.device, Any]) -> None:
        """Record an event on each of ``streams``, on which all work for the value is enqueued."""
        self.add({device: (stream, runtime_of(device).record(stream)) for device, stream in streams.items()})

    def add(self, events: Mapping[torch.device, tuple[Any, Any]]) -> None:
        """Take a stream of each device that has all work for the value, and an event after that."""
        for device, (stream, event) in events.items():
            self._devices.setdefault(device)
            self._recorded.append((device, stream, event))

    def successor(self) -> DeviceEvents:
        """Events for a value computed from this one: none recorded, all else the same."""
        result = DeviceEvents(self._devices, high_priority=self._high_priority, captured=self._captured)
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
            result._captured = result._captured or part._captured
            result._high_priority = result._high_priority or part._high_priority
        return result

    def complete(self, value: object, inputs: object = None) -> None:
        """Record the missing events, and protect the memory of tensors until the streams are done with it.

        Args:
            value: the value of the future.
            inputs: other values that the streams may still read.
        """
        tensors = [*device_tensors(value), *device_tensors(inputs)]
        recorded = {device for device, _, _ in self._recorded}
        needed = [*self._devices, *(tensor.device for tensor in tensors)]
        missing = dict.fromkeys(device for device in needed if device not in recorded)
        if any(runtime_of(device).capturing(device) for device in missing):
            self._captured = True
        self.record(current_streams(missing))
        for device, stream, _ in self._recorded:
            _record_streams(tensors, device, stream)

    def order(self, value: object) -> None:
        """Make the current streams of the calling thread wait for the events; does not block the host.

        Args:
            value: the value of the future; its memory is not reused while these streams use it.

        Raises:
            UsageError: a current stream captures a graph, and the work was enqueued before.
            Exception: the work is known to have failed.
        """
        tensors = list(device_tensors(value))
        self._refuse_in_capture()
        for check in self._checks:
            check(0.0)
        for device, _, event in self._recorded:
            runtime = runtime_of(device)
            current = runtime.current_stream(device)
            runtime.wait_event(current, event)
            _record_streams(tensors, device, current)

    def synchronize(self, value: object, timeout: float | None = None) -> bool:
        """Block until the events have occurred; return False after ``timeout`` seconds.

        Args:
            value: the value of the future; its memory is not reused while the current streams use it.

        Raises:
            UsageError: the work is captured into a graph, or a current stream captures one.
            Exception: the device, or the work on it, failed.
        """
        if self._captured:
            raise UsageError(
                "wait() cannot block for work that is captured into a graph, because it runs when the graph "
                "is replayed: call wait(blocking=False) during the capture, and synchronize the stream "
                "after a replay"
            )
        self._refuse_in_capture()
        deadline = None if timeout is None else time.monotonic() + timeout
        tensors = list(device_tensors(value))
        for device, _, event in self._recorded:
            runtime = runtime_of(device)
            while not runtime.synchronize(event, _slice(deadline)):
                for check in self._checks:
                    check(0.0)
                if deadline is not None and time.monotonic() >= deadline:
                    return False
            _record_streams(tensors, device, runtime.current_stream(device))
        for check in self._checks:
            while not check(_slice(deadline)):
                if deadline is not None and time.monotonic() >= deadline:
                    return False
        return True

    def _refuse_in_capture(self) -> None:
        if self._captured:
            return
        for device, _, _ in self._recorded:
            if runtime_of(device).capturing(device):
                raise UsageError(
                    f"wait() during the capture of a graph, but the work on {device} was enqueued before it: "
                    "wait before the capture begins"
                )

    @contextmanager
    def ordered_streams(
        self,
        value: object,
        high_priority: bool | None = None,
        given: Mapping[torch.device, Any] | None = None,
    ) -> Iterator[None]:
        """A context in which the current stream of each device waits for the events.

        Args:
            value: the value of the future; its memory is not reused while these streams use it.
            high_priority: use new streams with high priority; None: as given to the constructor.
            given: use these streams; a device without one keeps its current stream.  None: use new streams.
        """
        tensors = list(device_tensors(value))
        high = self._high_priority if high_priority is None else high_priority
        streams = {}
        for device in self._devices:
            runtime = runtime_of(device)
            if given is None:
                streams[device] = runtime.stream_from_pool(device, high)
            else:
                streams[device] = given.get(device) or runtime.current_stream(device)
        for device, _, event in self._recorded:
            runtime_of(device).wait_event(streams[device], event)
        for device, stream in streams.items():
            _record_streams(tensors, device, stream)
        with use_streams(streams):
            yield


def completion_events(value: object, given: DeviceEvents | None, inputs: object) -> DeviceEvents | None:
    """The events for a future that completes with ``value``; None if no device is used."""
    if given is None:
        if next(device_tensors(value), None) is None:
            return None
        given = DeviceEvents()
    given.complete(value, inputs)
    return given


def current_streams(devices: Iterable[torch.device]) -> dict[torch.device, Any]:
    """The current streams of the calling thread."""
    return {device: runtime_of(device).current_stream(device) for device in devices}


def all_current_streams() -> dict[torch.device, Any]:
    """The current streams of the calling thread on all devices that this process has used."""
    return {
        device: runtime.current_stream(device)
        for runtime in _runtimes.values()
        for device in runtime.devices()
    }


@contextmanager
def use_streams(streams: Mapping[torch.device, Any]) -> Iterator[None]:
    """A context in which ``streams`` are the current streams, and the first device is current."""
    with ExitStack() as stack:
        # Using a stream makes its device current too.
        for device, stream in reversed(list(streams.items())):
            stack.enter_context(runtime_of(device).use(stream))
        yield


def _slice(deadline: float | None) -> float:
    return _SLICE_S if deadline is None else min(_SLICE_S, max(0.0, deadline - time.monotonic()))


def _record_streams(tensors: Iterable[torch.Tensor], device: torch.device, stream: Any) -> None:
    for tensor in tensors:
        if tensor.device == device:
            runtime_of(device).record_stream(tensor, stream)
