"""An operation as the master sees it: its tensors on nodes, its numbers, and everything else.

Its key is the operator, the metadata of its tensors, and its other arguments. Numbers that are sent with
every call appear in the key by type only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...errors import UnsupportedOperation
from ..commands.storage import Storage
from ..protocol.commands import Template
from ..protocol.operators import Operator
from .node_devices import NodeDevice, node_device
from .tensor import RemoteTensor

#: largest magnitude of an integer that is sent as a float without loss
MAX_EXACT_INT = 2**53


class OperatorCall:
    """An operator and its arguments, classified.

    Attributes:
        op, args, kwargs: the operator and its arguments.
        key: identifies the interned call.
        operands: its tensors on nodes, in the order of the arguments.
        ids: their ids.
        scalars: the numbers that are sent with every call.
        is_remote: False if it has tensors that are not on a node; then the other attributes are incomplete.
    """

    __slots__ = ("args", "ids", "is_remote", "key", "kwargs", "op", "operands", "scalars")

    def __init__(self, op: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        key: list[Any] = [op] if op.opaque is None else [op, torch.is_grad_enabled()]
        operands: list[RemoteTensor] = []
        ids: list[int] = []
        self.key, self.operands, self.ids = key, operands, ids
        self.scalars: list[float] = []
        self.is_remote = False
        numeric, lists = op.numeric, op.numeric_lists
        given: Iterable[tuple[int | str, Any]] = enumerate(args)
        if kwargs:
            key.append(tuple(kwargs))
            given = (*given, *kwargs.items())
        for at, value in given:
            kind = type(value)
            if kind is RemoteTensor:
                handle = value.handle
                operands.append(value)
                ids.append(handle.id)
                key.append(handle.metadata)
            elif at in numeric:
                if not self._add_number(value):
                    return
            elif kind is list or kind is tuple:
                key.append(len(value))
                for each in value:
                    if type(each) is RemoteTensor:
                        operands.append(each)
                        ids.append(each.handle.id)
                        key.append(each.handle.metadata)
                    elif at in lists:
                        if not self._add_number(each):
                            return
                    elif isinstance(each, torch.Tensor):
                        return
                    else:
                        key.append(each)
            elif isinstance(value, torch.Tensor):
                return
            else:
                key.append(value)
        self.is_remote = True

    def _add_number(self, value: Any) -> bool:
        """Add a numeric argument; return False if it is a tensor that is not on a node."""
        kind = _number_kind(value)
        self.key.append(type(value))  # the dtype of the result depends on the type of the number
        if kind is not None:
            self.scalars.append(value)
        elif isinstance(value, torch.Tensor):
            return False
        else:
            self.key.append(value)
        return True

    def use_device(self, index: int) -> None:
        """Create the result on this device within the node."""
        self.kwargs = {**self.kwargs, "device": node_device(index)}
        self.key.append(index)

    def storages(self) -> list[Storage]:
        """The memory of the operands."""
        return [each.handle.memory() for each in self.operands]

    def templates(self) -> tuple[list[Template], dict[str, Template]]:
        """The arguments without operands and numbers, which are in the order of the arguments."""
        return (
            [self._template(at, value) for at, value in enumerate(self.args)],
            {at: self._template(at, value) for at, value in self.kwargs.items()},
        )

    def _template(self, at: int | str, value: Any) -> Template:
        if isinstance(value, (list, tuple)):
            return "list", [_template(each, at in self.op.numeric_lists) for each in value]
        return _template(value, at in self.op.numeric)

    def written(self) -> list[int]:
        """Positions of the operands that it writes to."""
        written: list[int] = []
        count = 0
        for at, value in (*enumerate(self.args), *self.kwargs.items()):
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if type(each) is RemoteTensor:
                    if at in self.op.writes:
                        written.append(count)
                    count += 1
        return written

    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        flat: list[Any] = []
        for value in (*self.args, *self.kwargs.values()):
            flat += value if isinstance(value, (list, tuple)) else (value,)
        return [each for each in flat if isinstance(each, torch.Tensor)]


def _number_kind(value: object) -> str | None:
    """Type of the operand that the number is sent as, "float" or "int"; None if it is not an operand."""
    kind = type(value)
    if kind is float:
        return "float"
    return "int" if kind is int and -MAX_EXACT_INT <= value <= MAX_EXACT_INT else None  # type: ignore[operator]


def _template(value: Any, numeric: bool) -> Template:
    if isinstance(value, RemoteTensor):
        return ("tensor",)
    if isinstance(value, (list, tuple)):  # of a list
        return "list", [_template(each, False) for each in value]
    kind = _number_kind(value) if numeric else None
    if kind is not None:
        return "number", kind
    if isinstance(value, torch.device):
        return ("device",)
    if isinstance(value, NodeDevice):
        return "device", value.index
    if isinstance(value, torch.Generator):
        raise UnsupportedOperation(
            "a generator of this process cannot draw numbers on a node: leave generator= out, and seed all "
            "nodes with torch.manual_seed"
        )
    return "constant", value
