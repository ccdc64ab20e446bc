"""Effects of a recorded call on its arguments and on the master's random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...common.containers import tensors
from ..tensor.tensor import RemoteTensor

#: functions that return metadata, a view or a transferred copy of a tensor, without reading elements
_NOT_READING = frozenset(
    {
        "__get__", "__len__", "chunk", "contiguous", "detach", "dim", "element_size", "expand", "flatten",
        "is_contiguous", "is_floating_point", "is_complex", "movedim", "narrow", "nelement", "ndimension",
        "numel", "permute", "requires_grad_", "reshape", "select", "size", "split", "squeeze", "stride",
        "storage_offset", "swapaxes", "t", "tensor_split", "to", "transpose", "unbind", "unflatten",
        "unsqueeze", "view", "view_as",
    }
)  # fmt: skip


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter of a tensor, or None if torch keeps none (inference tensors)."""
    return None if tensor.is_inference() else tensor._version


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key of the memory that a tensor of the master shows; the storage comes first."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class ReadTracker(TorchFunctionMode):
    """Finds the leaves of the master whose elements are read, not only moved to a node."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._at: dict[int, set[int]] = {}
        for i, leaf in enumerate(leaves):
            if type(leaf) is not RemoteTensor:
                self._at.setdefault(memory_of(leaf)[0], set()).add(i)
        self.read: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(tensors((args, kwargs)))
        remote = any(type(each) is RemoteTensor for each in given)
        name = getattr(func, "__name__", "")
        for i, each in enumerate(given):
            here = type(each) is not RemoteTensor and each.layout == torch.strided
            at = self._at.get(memory_of(each)[0]) if here else None
            if at is None or name in _NOT_READING or (name == "__getitem__" and not i and len(given) == 1):
                continue
            # Indices and zero-dimensional operands of an operation on a node are only moved there.
            if not (remote and (name == "__getitem__" or not each.dim())):
                self.read |= at
        return func(*args, **(kwargs or {}))


class Effects:
    """The changes that a call makes to the master's state; `leaves` are the tensors of its arguments."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = [(leaf, _identity(leaf), version_of(leaf)) for leaf in leaves]
        self._drawn = _drawn()
        self._generator = torch.get_rng_state()

    def written(self) -> list[int]:
        """Return the positions of the nodes' tensors that the call wrote to."""
        return [
            i
            for i, (leaf, _, version) in enumerate(self._leaves)
            if type(leaf) is RemoteTensor and version_of(leaf) != version
        ]

    def generator(self) -> torch.Tensor | None:
        """Return the state of the CPU's random generator, or None if the call did not change it."""
        now = torch.get_rng_state()
        return None if torch.equal(now, self._generator) else now

    def changed(self, now: torch.Tensor | None, before: torch.Tensor | None) -> str | None:
        """Describe a change that no replay would make; `now`, `before`: results of :meth:`generator`."""
        for i, (leaf, identity, version) in enumerate(self._leaves):
            if _identity(leaf) != identity:
                return (
                    f"it changes the shape, the data or requires_grad of tensor {i} among its arguments, not "
                    "only elements"
                )
            if type(leaf) is not RemoteTensor and version_of(leaf) != version:
                return f"it writes to tensor {i} among its arguments, a tensor of the master"
        drawn = [name for name, state in _drawn().items() if self._drawn.get(name, state) != state]
        if now is not None and (before is None or not torch.equal(now, before)):
            drawn.append("torch at the master")
        if not drawn:
            return None
        return (
            f"it draws random numbers of {drawn[0]}, and a replay would not draw new ones: draw them before "
            "the call and pass them, or draw on the node"
        )


def _identity(leaf: torch.Tensor) -> tuple[Any, ...]:
    where = id(leaf.handle) if type(leaf) is RemoteTensor else (leaf.data_ptr(), leaf.shape, leaf.stride())
    return where, leaf.requires_grad


def _drawn() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["NumPy"] = kind, keys.tobytes(), rest
    return states
