"""Nested arguments and results of recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...common.containers import Tree, is_named_tuple
from ...common.never_compile import never_compile
from ..tensor.tensor import RemoteTensor, TensorHandle, new_tensor
from .guards import PLAIN
from .recording import Name, Recording

_Build = Callable[[dict[Name, TensorHandle], Sequence[Any]], Any]


def flatten(value: Any, key: list[Any], leaves: list[Any], others: list[Any]) -> None:
    """Append the key of the arguments, their tensors, and the objects compared by identity.

    A container that occurs again is represented in the key by its number.
    """
    numbers: dict[int, int] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind is RemoteTensor:
            required = value.requires_grad
            key += (value.handle.metadata, required)
            if required and value.is_leaf:  # a parameter
                key.append(id(value))
                others.append(value)
            leaves.append(value)
        elif kind is tuple or kind is list or kind is dict or is_named_tuple(kind):
            if (number := numbers.get(id(value))) is not None:
                key += ("again", number)
                continue
            numbers[id(value)] = len(numbers)
            key += (kind, len(value))
            if kind is dict:
                key += value
                pending += reversed(value.values())
            else:
                pending += reversed(value)
        elif kind in PLAIN:
            key += (kind, value)
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
            key += (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            leaves.append(value)
        else:
            key += (kind, id(value))
            others.append(value)


@never_compile
class _GraphEndedInReplay(torch.autograd.Function):
    """Gives a result `requires_grad`, as in the recording, and an error for backward passes."""

    @staticmethod
    def forward(ctx: Any, tensor: RemoteTensor, anchor: torch.Tensor) -> RemoteTensor:
        return new_tensor(tensor.handle)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "a result of a recorded step has no graph: call backward() inside the function that is recorded"
        )


_anchor = torch.zeros((), requires_grad=True, device="cpu")


def _result(handle: TensorHandle, graph: bool) -> RemoteTensor:
    made = new_tensor(handle)
    if not graph:
        return made
    with torch.enable_grad():
        return _GraphEndedInReplay.apply(made, _anchor)  # type: ignore[no-any-return, no-untyped-call]


class Results:
    """The structure of a call's result.

    Attributes:
        handles: handles, by name, of the result's tensors that the call created and that nothing else holds.
        constants: other values in the result.
    """

    def __init__(
        self, recording: Recording, result: Any, leaves: Sequence[Any], static: set[TensorHandle]
    ) -> None:
        self._recording = recording
        self._static = static
        self._leaves = {id(each): i for i, each in enumerate(leaves)}
        self.constants: list[Any] = []
        self.handles: dict[Name, TensorHandle] = {}
        tree = Tree(result, self._is_leaf)
        parts = [self._built(each) for each in tree.leaves]
        tree.leaves = []  # releases the tensors of nodes
        self.build: _Build = lambda made, leaves: tree.build([part(made, leaves) for part in parts])

    def _is_leaf(self, value: Any) -> bool:
        kind = type(value)
        opened = kind in (tuple, list, dict) or is_named_tuple(kind)
        return not opened or id(value) in self._leaves

    def _built(self, value: Any) -> _Build:
        kind = type(value)
        if id(value) in self._leaves:
            at = self._leaves[id(value)]
            return lambda made, leaves: leaves[at]
        if kind is RemoteTensor:
            handle = value.handle
            place = self._recording.place(handle)
            name = ("outside",) if place is None else self._recording.named(*place)
            if name[0] == "input":
                position = name[1]
                return lambda made, leaves: new_tensor(leaves[position].handle)
            graph = value.grad_fn is not None
            if name[0] == "outside" or handle in self._static:
                return (lambda made, leaves: _result(handle, True)) if graph else lambda made, leaves: value
            self.handles[name] = handle
            return lambda made, leaves: _result(made[name], graph)
        self.constants.append(value)
        return lambda made, leaves: value

    def differ(self, constants: Sequence[Any]) -> bool:
        """Whether another call returned other values, apart from tensors of nodes."""
        return len(constants) != len(self.constants) or any(
            a is not b and (type(a) is not type(b) or type(a) not in PLAIN or a != b)
            for a, b in zip(constants, self.constants, strict=True)
        )
