"""Tensors outside of a pickle: their metadata in it, the memory to send, and their rebuilding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UsageError
from ...streams import runtime_of

if TYPE_CHECKING:
    from ..connection.worker_connection import WorkerConnection

#: memory to send: its address and its size in bytes
Part = tuple[int, int]

#: bytes; spans begin at a multiple of this, so that elements of every dtype stay aligned
_ALIGNMENT = 16
#: maximum number of tensors and buffers of one value
MAX_PARTS = 65_535
_NAMES = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name == str(value)[6:]
}


def check(x: torch.Tensor) -> None:
    """Raise UsageError if ``x`` has an autograd graph."""
    if x.grad_fn is not None:
        raise UsageError(
            f"a tensor {kind_of(x)} is the result of {x.grad_fn.name()}, and an autograd "
            "graph cannot be sent to another worker: send x.detach()"
        )


def kind_of(x: torch.Tensor) -> str:
    """Return "of shape (2, 3)", or a text for nested tensors, which have no shape."""
    return "of nested tensors" if x.is_nested else f"of shape {tuple(x.shape)}"


def check_count(parts: Sequence[object]) -> None:
    """Raise UsageError for more tensors and buffers than one message can have."""
    if len(parts) > MAX_PARTS:
        raise UsageError(
            f"{len(parts)} tensors and buffers; one value may have at most {MAX_PARTS}: stack them"
        )


class TensorCollector:
    """The memory of the tensors of one message.

    Args:
        route: the connection, which maps devices; None: tensors on devices are refused.
    """

    def __init__(self, route: WorkerConnection | None = None) -> None:
        self._route = route
        self._maps_cpu = route is not None and route.devices is not None and route.devices.maps_cpu
        #: address of a storage, or (device, address) -> its number
        self.numbers: dict[Any, int] = {}
        #: of each storage, the offsets in bytes of the beginning and the end of the used span
        self.spans: list[list[int]] = []
        self.keep: list[object] = []
        #: number of a storage on a device -> its bytes, from the beginning
        self.on_devices: dict[int, torch.Tensor] = {}
        #: whether tensors arrive on devices
        self.arrives_on_device = False

    def reduce(self, x: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how ``x`` is pickled without its memory, and add its memory to this message."""
        number = offset = 0
        on_device = x.device.type != "cpu"
        target = self._target(x) if on_device or self._maps_cpu else None
        if x.numel():
            size = x.element_size()
            storage = x.untyped_storage()
            offset = int(x.storage_offset())
            begin = offset * size
            last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            end = begin + (last + 1) * size
            begin -= begin % _ALIGNMENT
            address = (x.device, storage.data_ptr()) if on_device else storage.data_ptr()
            number = self.numbers.setdefault(address, len(self.spans))
            if number == len(self.spans):
                self.spans.append([begin, end])
                self.keep.append(storage)
            else:
                span = self.spans[number]
                span[0], span[1] = min(begin, span[0]), max(end, span[1])
            if on_device:
                self._keep_bytes(number, x, end)
        layout = (number, _NAMES[x.dtype], offset, tuple(x.shape), x.stride())
        rest = (x.requires_grad, isinstance(x, torch.nn.Parameter), x.__dict__ or None)
        return _tensor, (*layout, *rest) if target is None else (*layout, *rest, target)

    def _keep_bytes(self, number: int, x: torch.Tensor, end: int) -> None:
        known = self.on_devices.get(number)
        if known is None or known.numel() < end:  # whole elements of a wider dtype may end earlier
            self.on_devices[number] = _bytes_of(x)

    def _target(self, x: torch.Tensor) -> str | None:
        if self._route is None:
            raise UsageError(f"a tensor of shape {tuple(x.shape)} is on {x.device}: send x.cpu()")
        target = self._route.target(x)
        if target.type == "cpu":
            return None
        self.arrives_on_device = True
        return str(target)

    def parts(self) -> Iterator[Part]:
        for address, (begin, end) in zip(self.numbers, self.spans, strict=True):
            yield (address + begin if isinstance(address, int) else 0), end - begin

    def device_parts(self) -> dict[int, torch.Tensor]:
        """Return index -> bytes of each part that is in device memory."""
        return {
            number: known[self.spans[number][0] : self.spans[number][1]]
            for number, known in self.on_devices.items()
        }


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of the storage of ``x``, truncated to whole elements."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((count,), (1,), 0).view(torch.uint8)


# -- receiving ----------------------------------------------------------------------------------


class _ReceivedStorages(threading.local):
    storages: Sequence[torch.UntypedStorage] = ()
    #: number of a storage -> its bytes on the device; None: no storage was copied to a device yet
    device_bytes: dict[int, torch.Tensor] | None = None
    starts: Sequence[int] = ()


_received = _ReceivedStorages()


@contextmanager
def received_storages(parts: Sequence[Any], starts: Sequence[int]) -> Iterator[None]:
    """A context in which this thread unpickles tensors over ``parts``, whose spans began at ``starts``."""
    before = _received.storages, _received.starts, _received.device_bytes
    _received.storages, _received.starts, _received.device_bytes = (
        [_storage(part) for part in parts],
        starts,
        None,
    )
    try:
        yield
    finally:
        _received.storages, _received.starts, _received.device_bytes = before


def _storage(part: Any) -> torch.UntypedStorage:
    return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()


def _tensor(
    number: int,
    name: str,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    parameter: bool,
    attributes: dict[str, Any] | None,
    target: str = "cpu",
) -> torch.Tensor:
    dtype = getattr(torch, name)
    if 0 in shape:
        x = torch.empty_strided(shape, stride, dtype=dtype, device=target)
    else:
        offset -= _received.starts[number] // dtype.itemsize
        if target == "cpu":
            x = torch.empty(0, dtype=dtype, device="cpu").set_(
                _received.storages[number], offset, shape, stride
            )
        else:
            x = _bytes_on_device(number, torch.device(target)).view(dtype).as_strided(shape, stride, offset)
    if parameter:
        x = torch.nn.Parameter(x, requires_grad)
    elif requires_grad:
        x.requires_grad_()
    if attributes:
        x.__dict__.update(attributes)
    return x


def _bytes_on_device(number: int, device: torch.device) -> torch.Tensor:
    """Return the bytes of a storage on a device; the first use enqueues the copy on the current stream."""
    if _received.device_bytes is None:
        _received.device_bytes = {}
    found = _received.device_bytes.get(number)
    if found is None:
        storage = _received.storages[number]
        bytes = storage.nbytes()
        host = runtime_of(device).host_memory(bytes)
        host.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        found = torch.empty(-(-bytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=device)
        found[:bytes].copy_(host, non_blocking=True)
        _received.device_bytes[number] = found
    return found
