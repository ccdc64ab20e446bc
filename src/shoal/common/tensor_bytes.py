"""The memory of a tensor as bytes, without numpy, which torch does not require."""

from __future__ import annotations

import ctypes

import torch

_PyBUF_READ = 0x100

#: a separate prototype: the argument types of ``ctypes.pythonapi.NAME`` are shared by the whole process
_view_of_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class TensorBytes:
    """A read-only view of the bytes of a tensor of any dtype, shape and device, valid in a ``with`` block.

        with TensorBytes(tensor) as view:
            value = pickle.loads(view)

    A contiguous CPU tensor is not copied.  The tensor is kept alive until the block ends, and the view is
    released then.  A slice of the view is not released: do not use it after the block.
    """

    __slots__ = ("_tensor", "_view")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = plain_memory(tensor)

    def __enter__(self) -> memoryview:
        # A ctypes array type would take 10 us for each new size; this takes less than 1 us.
        view: memoryview = _view_of_memory(self._tensor.data_ptr(), self._tensor.nbytes, _PyBUF_READ)
        self._view = view
        return view

    def __exit__(self, *_: object) -> None:
        self._view.release()


def plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself if it is plain, contiguous and on the CPU, else such a copy."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.cpu().contiguous()
