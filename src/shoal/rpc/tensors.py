"""Tensors beside a pickle: what is kept of them in it, the memory to send, and how they are made again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import UsageError

#: memory to send: its address and its bytes
Part = tuple[int, int]

#: the multiple of bytes at which a span begins, so that elements of every dtype stay aligned
_ALIGNMENT = 16
_NAMES = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name == str(value)[6:]
}


def check(x: torch.Tensor) -> None:
    """Refuse tensors that cannot be sent as they are."""
    if x.grad_fn is not None:
        raise UsageError(
            f"a tensor of shape {tuple(x.shape)} is the result of {x.grad_fn.name()}, and a graph of "
            "autograd does not go to another worker: send x.detach()"
        )
    if x.device.type not in ("cpu", "meta"):
        raise UsageError(
            f"a tensor of shape {tuple(x.shape)} lies on {x.device}, and only those of the CPU can be sent: "
            "send x.cpu()"
        )


class Collected:
    """The memory that tensors of one message lie in."""

    def __init__(self) -> None:
        #: address of a storage -> its number
        self.numbers: dict[int, int] = {}
        #: of each storage, the first byte in use and the one behind the last
        self.spans: list[list[int]] = []
        self.keep: list[object] = []

    def reduce(self, x: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The part of ``x`` that pickle keeps: everything but its memory."""
        number = offset = 0
        if x.numel():
            size = x.element_size()
            storage = x.untyped_storage()
            offset = int(x.storage_offset())
            begin = offset * size
            last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            end = begin + (last + 1) * size
            begin -= begin % _ALIGNMENT
            number = self.numbers.setdefault(storage.data_ptr(), len(self.spans))
            if number == len(self.spans):
                self.spans.append([begin, end])
                self.keep.append(storage)
            else:
                span = self.spans[number]
                span[0], span[1] = min(begin, span[0]), max(end, span[1])
        layout = (number, _NAMES[x.dtype], offset, tuple(x.shape), x.stride())
        return _tensor, (*layout, x.requires_grad, isinstance(x, torch.nn.Parameter), x.__dict__ or None)

    def parts(self) -> Iterator[Part]:
        for address, (begin, end) in zip(self.numbers, self.spans, strict=True):
            yield address + begin, end - begin


# -- at the other end ---------------------------------------------------------------------------


class _Arrived(threading.local):
    storages: Sequence[torch.UntypedStorage] = ()
    starts: Sequence[int] = ()


_arrived = _Arrived()


@contextmanager
def arrived(parts: Sequence[Any], starts: Sequence[int]) -> Iterator[None]:
    """Let the tensors that this thread unpickles lie in ``parts``, whose spans began at ``starts``."""
    before = _arrived.storages, _arrived.starts
    _arrived.storages, _arrived.starts = [_storage(part) for part in parts], starts
    try:
        yield
    finally:
        _arrived.storages, _arrived.starts = before


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
) -> torch.Tensor:
    dtype = getattr(torch, name)
    if 0 in shape:
        x = torch.empty_strided(shape, stride, dtype=dtype)
    else:
        offset -= _arrived.starts[number] // dtype.itemsize
        x = torch.empty(0, dtype=dtype).set_(_arrived.storages[number], offset, shape, stride)
    if parameter:
        x = torch.nn.Parameter(x, requires_grad)
    elif requires_grad:
        x.requires_grad_()
    if attributes:
        x.__dict__.update(attributes)
    return x
