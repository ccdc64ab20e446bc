"""The alternative API of the mode in ``shoal.distributed``; its ``node`` is in ``tensor/node_devices.py``.

    shoal.distributed.init_master_worker(backend="tcp", workers=2)
    x = shoal.distributed.FloatTensor(20, 20).fill_(4)
    y = torch.randn(20, 20).dist_send()
    with shoal.distributed.node(1):
        a = shoal.distributed.FloatTensor(10)

``dist_send`` is a method of all tensors while a master is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...distributed.backend import parse_backend
from ..tensor import current
from ..tensor.node_devices import node, selected_device
from ..tensor.tensor import RemoteTensor
from . import master


def init_master_worker(backend: str | None = None, **how: Any) -> master.Master:
    """Call :func:`shoal.init_master_worker` with a backend name of ``init_process_group``.

    None is the native backend, ``"tcp"`` the same with ``transport="tcp"``. A backend without equivalent in
    shoal raises UnsupportedOperation.
    """
    engine = parse_backend("gloo" if backend is None else backend)
    return master.init_master_worker(backend=engine.backend, transport=engine.transport, **how)


class _TensorType(type):
    """The metaclass of tensor types: a call makes a tensor on a node; ``isinstance`` compares the dtype."""

    dtype: torch.dtype

    def __call__(cls, *data: Any, device: int | None = None) -> torch.Tensor:
        at = selected_device.device if device is None else device
        with node(selected_device.node, at):
            if all(type(each) is int for each in data):
                return torch.empty(data or (0,), dtype=cls.dtype, device=torch.get_default_device())
            if len(data) == 1 and isinstance(data[0], torch.Size):
                return torch.empty(data[0], dtype=cls.dtype, device=torch.get_default_device())
            if len(data) == 1 and isinstance(data[0], torch.Tensor):
                return data[0].to(current.master().space(selected_device.node).device, cls.dtype)
            if len(data) == 1 and isinstance(data[0], Sequence):
                return torch.tensor(data[0], dtype=cls.dtype, device=torch.get_default_device())
        raise TypeError(f"{cls.__name__} takes sizes, a sequence of numbers, or a tensor, got {data!r}")

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, RemoteTensor) and value.dtype == cls.dtype


def _tensor_type(name: str, dtype: torch.dtype) -> _TensorType:
    made = _TensorType(name, (), {"dtype": dtype, "__module__": __name__})
    made.__doc__ = f"""A tensor of ``{dtype}`` on a node.

    Args:
        data: sizes (elements are uninitialized), a sequence of numbers, or a tensor.
        device: the device within the node of ``with node(i)``, or of node 0; -1: its CPU.
    """
    return made


FloatTensor = _tensor_type("FloatTensor", torch.float32)
DoubleTensor = _tensor_type("DoubleTensor", torch.float64)
HalfTensor = _tensor_type("HalfTensor", torch.float16)
BFloat16Tensor = _tensor_type("BFloat16Tensor", torch.bfloat16)
ByteTensor = _tensor_type("ByteTensor", torch.uint8)
CharTensor = _tensor_type("CharTensor", torch.int8)
ShortTensor = _tensor_type("ShortTensor", torch.int16)
IntTensor = _tensor_type("IntTensor", torch.int32)
LongTensor = _tensor_type("LongTensor", torch.int64)
BoolTensor = _tensor_type("BoolTensor", torch.bool)
