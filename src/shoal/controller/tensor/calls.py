"""Interned calls: each combination of operator and operand metadata is described to a node once.

Issuing a known call costs the master one lookup of the key of an :class:`.operator_call.OperatorCall`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ...errors import DeviceMismatch
from ..commands.history import CallSignature
from ..commands.space import Space
from ..protocol.commands import DEFINE, FIRST, Definition
from ..protocol.metadata import WireMetadata, metadata
from .operator_call import OperatorCall

if TYPE_CHECKING:
    from .prediction import Prediction

#: number of interned calls after which the master and the nodes discard all of them
MAX_INTERNED_CALLS = 65_536
#: number of operations after which the master warns if more than a tenth were cache misses
MIN_OPERATIONS_TO_WARN = 5_000
#: number of operators that the warning names
MAX_NAMED_OPERATORS = 3


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
        reports_success: whether its last result is the success flag of its other results.
        memory: memory of the results and of the mutated operands, as in :class:`Prediction`.
        view_of: position of the operand that its only new tensor is a view of, or None.
        written: positions of the operands that it writes to.
        random: whether it draws random numbers.
    """

    __slots__ = (
        "count", "in_place", "memory", "mutated", "number", "random", "reports_success", "results",
        "returned", "single", "view_of", "written",
    )  # fmt: skip

    def __init__(self, number: int, device: torch.device, predicted: Prediction | None) -> None:
        self.number = number
        self.memory = [] if predicted is None else predicted.memory
        self.written: list[int] = []
        self.random = self.reports_success = False
        results, mutated = ([], {}) if predicted is None else (predicted.results, predicted.mutated)
        self.results = [metadata(device, each) for each in results]
        self.mutated = [(at, metadata(device, each)) for at, each in mutated.items()]
        self.returned = ("constant", None) if predicted is None else predicted.returned
        self.single = self.returned == ("new", 0) and len(self.results) == 1 and not self.mutated
        self.view_of: int | None = None
        self.in_place = self.returned == ("operand", 0) and not self.mutated
        self.count = len(self.results) + len(self.mutated)


#: marks a call whose results only the node can determine
NODE_DETERMINED = InternedCall(0, torch.device("cpu"), None)


def intern(space: Space, operation: OperatorCall) -> InternedCall:
    """Define the call of a new key, with torch's checks; the caller holds the master's lock."""
    op, operands = operation.op, operation.operands
    space.raise_if_lost()
    others = {each.device for each in operands} - {space.device}
    if others:
        elsewhere = ", ".join(sorted(map(str, others)))
        advice = f"move them to one node, with .to({str(space.device)!r})"
        if any(len(each.handle.space.connections) > len(space.connections) for each in operands):
            advice = f"take one node's part of the others, with .on({space.index})"
        raise DeviceMismatch(f"{op.name}: its tensors are on {space.device} and on {elsewhere}: {advice}")
    for each in operands:
        each.handle.space.raise_if_lost()  # the operand was on a node that has been replaced
    args, kwargs = operation.templates()
    from .prediction import CallToPredict, predict  # imported here because nodes do not need it

    known = [each.handle.metadata for each in operands]
    predicted = predict(CallToPredict(op.func, args, kwargs, known, operation.scalars))
    if predicted is None:
        call = NODE_DETERMINED
    else:
        if len(space.calls) >= MAX_INTERNED_CALLS:
            space.forget()
        call = InternedCall(FIRST + len(space.calls), space.device, predicted)
        if call.single and call.memory[0] < len(operands):
            call.view_of = call.memory[0]
        call.written, call.random = operation.written(), op.random
        call.reports_success = op.name.endswith("_ex")
        expected: list[WireMetadata | None] = [each.wire for each in call.results]
        if op.opaque is not None:
            expected[op.opaque] = None
        expected += [each.wire for _, each in call.mutated]
        definition = Definition(
            call.number, op.name, args, kwargs, len(operands), predicted.paths, expected,
            list(predicted.mutated), call.written, op.aliasing, op.opaque is None or torch.is_grad_enabled(),
        )  # fmt: skip
        space.define(DEFINE, tuple(definition))
        space.kinds[call.number] = CallSignature(
            op.name.replace("::", "."), len(operands), call.count, tuple(call.written)
        )
    space.calls[tuple(operation.key)] = call
    space.new_calls[op.name.replace("::", ".")] += 1
    return call


def misses_of(spaces: Iterable[Space]) -> str | None:
    """The warning if too many operations of these spaces were cache misses, else None."""
    logs = [log for each in spaces for log in (each, *each.stream_logs)]
    new_calls: Counter[str] = sum((log.new_calls for log in logs), Counter())
    return misses_in_words(sum(log.issued for log in logs), new_calls)


def misses_in_words(issued: int, new_calls: Counter[str]) -> str | None:
    """The warning if too many of `issued` operations were cache misses, else None."""
    misses = new_calls.total()
    if issued < MIN_OPERATIONS_TO_WARN or misses * 10 <= issued:
        return None
    worst = ", ".join(f"{name} ({count} times)" for name, count in new_calls.most_common(MAX_NAMED_OPERATORS))
    return (
        f"{misses} of {issued} operations on nodes were the first with operands of such shapes, which costs "
        f"the master some hundred microseconds each; most frequent: {worst}: pad shapes that change in each "
        "step to a few sizes, or run that part on the node with master.call"
    )
