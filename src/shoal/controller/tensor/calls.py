"""Interned calls: each combination of operator and operand metadata is described to a node once.

The key of a call is the operator, the metadata of its tensors, and its other arguments. Numbers that are sent
as operands appear in the key by type only. Issuing a known call costs the master one table lookup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import DeviceMismatch, UnsupportedOperation
from ..commands.history import Kind
from ..commands.losses import anew
from ..commands.space import Space
from ..protocol.commands import FIRST, Definition, Template
from ..protocol.metadata import WireMetadata, metadata
from ..protocol.operators import Operator
from .tensor import RemoteTensor
from .within import Within

if TYPE_CHECKING:
    from .prediction import Prediction

#: number of interned calls after which the master and the nodes discard all of them
LIMIT = 65_536
#: number of operations after which the master warns if more than a tenth were cache misses
MANY = 5_000
#: number of operators that the warning names
_WORST = 3
#: largest magnitude of an integer that is sent as a float without loss
_EXACT = 2**53


class InternedCall:
    """A call whose definition was sent to its node.

    Attributes:
        number: command number.
        results: metadata of the new tensors.
        mutated: (operand position, new metadata) of operands whose metadata the call changes.
        single: whether it returns exactly one new tensor and changes no metadata.
        in_place: whether it returns its first operand, which is its first argument.
        returned: otherwise, the structure of its return value, as in :class:`Prediction`.
        count: number of new ids it needs.
        proves: whether its last result is the success flag of its other results.
        memory: memory of the results and of the mutated operands, as in :class:`Prediction`.
        shows: position of the operand that its only new tensor is a view of, or None.
        written: positions of the operands that it writes to.
        random: whether it draws random numbers.
    """

    __slots__ = (
        "count", "in_place", "memory", "mutated", "number", "proves", "random", "results", "returned",
        "shows", "single", "written",
    )  # fmt: skip

    def __init__(self, number: int, device: torch.device, predicted: Prediction | None) -> None:
        self.number = number
        self.memory = [] if predicted is None else predicted.memory
        self.written: list[int] = []
        self.random = self.proves = False
        results, mutated = ([], {}) if predicted is None else (predicted.results, predicted.mutated)
        self.results = [metadata(device, each) for each in results]
        self.mutated = [(at, metadata(device, each)) for at, each in mutated.items()]
        self.returned = ("constant", None) if predicted is None else predicted.returned
        self.single = self.returned == ("new", 0) and len(self.results) == 1 and not self.mutated
        self.shows: int | None = None
        self.in_place = self.returned == ("operand", 0) and not self.mutated
        self.count = len(self.results) + len(self.mutated)


#: marks a call whose results only the node can determine
ASKED = InternedCall(0, torch.device("cpu"), None)


def number_kind(value: object) -> str | None:
    """Type of the operand that the number is sent as, "float" or "int"; None if it is not an operand."""
    kind = type(value)
    if kind is float:
        return "float"
    return "int" if kind is int and -_EXACT <= value <= _EXACT else None  # type: ignore[operator]


def collect(
    op: Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    key: list[Any],
    operands: list[RemoteTensor],
    scalars: list[float],
) -> bool:
    """Append the call's key, operands and scalars; return False if it has tensors that are not on a node."""
    numeric, lists = op.numeric, op.numeric_lists
    given: Iterable[tuple[int | str, Any]] = enumerate(args)
    if kwargs:
        key.append(tuple(kwargs))
        given = (*given, *kwargs.items())
    for at, value in given:
        kind = type(value)
        if kind is RemoteTensor:
            operands.append(value)
            key.append(value.handle.metadata)
        elif at in numeric:
            if not _number(value, key, scalars):
                return False
        elif kind is list or kind is tuple:
            if not _list(value, at in lists, key, operands, scalars):
                return False
        elif isinstance(value, torch.Tensor):
            return False
        else:
            key.append(value)
    return True


def _number(value: Any, key: list[Any], scalars: list[float]) -> bool:
    """Append a numeric argument; return False if it is a tensor that is not on a node."""
    kind = number_kind(value)
    key.append(type(value))  # the dtype of the result depends on the type of the number
    if kind is not None:
        scalars.append(value)
    elif isinstance(value, torch.Tensor):
        return False
    else:
        key.append(value)
    return True


def _list(
    values: Sequence[Any], numeric: bool, key: list[Any], operands: list[RemoteTensor], scalars: list[float]
) -> bool:
    key.append(len(values))
    for value in values:
        if type(value) is RemoteTensor:
            operands.append(value)
            key.append(value.handle.metadata)
        elif numeric:
            if not _number(value, key, scalars):
                return False
        elif isinstance(value, torch.Tensor):
            return False
        else:
            key.append(value)
    return True


def templates(
    op: Operator, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Template], dict[str, Template]]:
    """The arguments without operands, in the order of :func:`collect`."""
    return (
        [_template(value, at in op.numeric, at in op.numeric_lists) for at, value in enumerate(args)],
        {at: _template(value, at in op.numeric, at in op.numeric_lists) for at, value in kwargs.items()},
    )


def _template(value: Any, numeric: bool, numeric_list: bool) -> Template:
    if isinstance(value, RemoteTensor):
        return ("tensor",)
    if isinstance(value, (list, tuple)):
        return "list", [_template(each, numeric_list, False) for each in value]
    kind = number_kind(value) if numeric else None
    if kind is not None:
        return "number", kind
    if isinstance(value, torch.device):
        return ("device",)
    if isinstance(value, Within):
        return "device", value.index
    if isinstance(value, torch.Generator):
        raise UnsupportedOperation(
            "a generator of this process cannot draw numbers on a node: leave generator= out, and seed all "
            "nodes with torch.manual_seed"
        )
    return "constant", value


def intern(
    space: Space,
    op: Operator,
    key: list[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: Sequence[RemoteTensor],
    scalars: Sequence[float],
) -> InternedCall:
    """Define the call with this new key, with torch's checks; the caller holds the master's lock."""
    if space.lost is not None:
        raise anew(space.lost)
    others = {each.device for each in operands} - {space.device}
    if others:
        elsewhere = ", ".join(sorted(map(str, others)))
        advice = f"move them to one node, with .to({str(space.device)!r})"
        if any(len(each.handle.space.lines) > len(space.lines) for each in operands):
            advice = f"take one node's part of the others, with .on({space.index})"
        raise DeviceMismatch(f"{op.name}: its tensors are on {space.device} and on {elsewhere}: {advice}")
    for each in operands:
        if each.handle.space is not space and each.handle.space.lost is not None:
            raise anew(each.handle.space.lost)  # the operand was on a node that has been replaced
    given, named = templates(op, args, kwargs)
    known = [each.handle.metadata for each in operands]
    from .prediction import predict  # imported here because nodes do not need it

    predicted = predict(op.func, given, named, known, scalars)
    if predicted is None:
        call = ASKED
    else:
        if len(space.calls) >= LIMIT:
            space.forget()
        call = InternedCall(FIRST + len(space.calls), space.device, predicted)
        if call.single and call.memory[0] < len(operands):
            call.shows = call.memory[0]
        call.written, call.random = written_operands(op, args, kwargs), op.random
        call.proves = op.name.endswith("_ex")
        expected: list[WireMetadata | None] = [each.told for each in call.results]
        if op.opaque is not None:
            expected[op.opaque] = None
        expected += [each.told for _, each in call.mutated]
        definition = Definition(
            call.number, op.name, given, named, len(operands), predicted.paths, expected,
            list(predicted.mutated), op.aliasing, op.opaque is None or torch.is_grad_enabled(),
        )  # fmt: skip
        space.define(tuple(definition))
        space.kinds[call.number] = Kind(
            op.name.replace("::", "."), len(operands), call.count, tuple(call.written)
        )
        if op.name == "aten::empty_strided":
            space.blanks.add(call.number)
    space.calls[tuple(key)] = call
    space.missed[op.name.replace("::", ".")] += 1
    return call


def misses_of(spaces: Iterable[Space]) -> str | None:
    """The warning if too many operations of these spaces were cache misses, else None."""
    logs = [log for each in spaces for log in (each, *each.further)]
    missed: Counter[str] = sum((log.missed for log in logs), Counter())
    return misses_in_words(sum(log.issued for log in logs), missed)


def misses_in_words(issued: int, missed: Counter[str]) -> str | None:
    """The warning if too many of `issued` operations were cache misses, else None."""
    misses = missed.total()
    if issued < MANY or misses * 10 <= issued:
        return None
    worst = ", ".join(f"{name} ({count} times)" for name, count in missed.most_common(_WORST))
    return (
        f"{misses} of {issued} operations on nodes were the first with operands of such shapes, which costs "
        f"the master some hundred microseconds each; most frequent: {worst}: pad shapes that change in each "
        "step to a few sizes, or run that part on the node with master.call"
    )


def written_operands(op: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Positions of the operands that a call writes to."""
    written: list[int] = []
    count = 0
    for at, value in (*enumerate(args), *kwargs.items()):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if type(each) is RemoteTensor:
                if at in op.writes:
                    written.append(count)
                count += 1
    return written
