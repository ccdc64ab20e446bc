"""The commands of the master's log, and the descriptions of interned calls.

An interned call is the number of the call, the ids of its operands and the ids for its results. Numbers below
``FIRST`` are the commands below. An argument in the definition of a call is a *template*, one of::

    ("tensor",)             the next operand
    ("number", "float")     the next scalar, or "int"
    ("constant", value)
    ("device",)             the device of the first operand; without operands the node's CPU
    ("device", index)       a device within the node; -1: its CPU
    ("list", [templates])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .metadata import WireMetadata

#: FREE id
FREE = 0
#: PUT id, payload index: store a tensor of the master
PUT = 1
#: FETCH id: reply with its elements
FETCH = 2
#: SEED low half, high half
SEED = 3
#: FORGET: forget all calls
FORGET = 4
#: ASK payload index: run an operator (payload: operator, templates, ids, scalars); reply with metadata
ASK = 5
#: KEEP id, index: store a tensor of the last ASK
KEEP = 6
#: STATE payload index: set the random generator's state; payload None: reply with it
STATE = 7
#: DEFINE payload index: add the definition of a call
DEFINE = 8
#: SHARE space, id, space, id: store the first tensor also as the second
SHARE = 9
#: PROGRAM payload index: add a recipe, a recorded step that then runs like an interned call
PROGRAM = 10
#: ERASE number: forget a program
ERASE = 11
#: ITEM id: reply with its only element, as a number
ITEM = 12
#: CALL payload index, number: run a user-defined function; reply with its result
CALL = 13
#: TAKE id, number, position: store a tensor of the result of that CALL
TAKE = 14
#: DROP number: release the tensors of the result of that CALL
DROP = 15
#: WAIT node, space, stream, low half, high half: wait until a stream has reached that position in its log
WAIT = 24
#: RELEASE id, count: free an id once `count` streams have released it
RELEASE = 25
#: MARK id, timing: record an event; timing is 1 if its time is needed
MARK = 26
#: EXPECT number: wait until the master sends the number
EXPECT = 27
#: values for the node of WAIT: every node, and none
EVERY_NODE, NO_NODE = 0xFFFFFFFF, 0xFFFFFFFE
#: length of each command in numbers
WIDTHS = {
    FREE: 2, PUT: 3, FETCH: 2, SEED: 3, FORGET: 1, ASK: 2, KEEP: 3, STATE: 2, DEFINE: 2, SHARE: 5, PROGRAM: 2,
    ERASE: 2, ITEM: 2, CALL: 3, TAKE: 4, DROP: 2, WAIT: 6, RELEASE: 3, MARK: 3, EXPECT: 2,
}  # fmt: skip
#: number of the first interned call
FIRST = 32

Template = tuple[Any, ...]


def fill_templates(
    args: Sequence[Template],
    kwargs: Mapping[str, Template],
    tensors: Iterable[Any],
    scalars: Iterable[float],
    device: Callable[[Template], Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Fill the templates of a call with tensors and scalars; `device` converts a device template."""
    left, numbers = iter(tensors), iter(scalars)

    def given(template: Template) -> Any:
        kind = template[0]
        if kind == "tensor":
            return next(left)
        if kind == "number":
            value = next(numbers)
            return int(value) if template[1] == "int" else value
        if kind == "list":
            return [given(each) for each in template[1]]
        return device(template) if kind == "device" else template[1]

    return [given(each) for each in args], {name: given(each) for name, each in kwargs.items()}


class Segment(NamedTuple):
    """A part of the log of a space; see :mod:`shoal.controller.commands.space`.  Sent as a plain tuple.

    Attributes:
        space, stream: numbers of the space and of the stream.
        numbers: the commands and ids, packed as unsigned 32-bit integers.
        scalars: scalars of the calls, packed as doubles.
        id_limit: all ids are below it.
        payloads: tensors, pickles and None.
    """

    space: int
    stream: int
    numbers: bytes
    scalars: bytes
    id_limit: int
    payloads: list[Any]


class Definition(NamedTuple):
    """The definition of an interned call, as sent to nodes.

    Attributes:
        number: number of the call.
        operator: such as ``aten::add.Tensor``.
        args, kwargs: templates.
        operands: number of tensors it takes.
        results: positions of the new tensors in the operator's return value, as paths of indices.
        expected: metadata of the results; None: only the operator's backward reads the result.
        mutated: operands whose metadata it changes; they get new ids after those of the results.
        written: operands that it writes to, which are poisoned if it fails.
        aliasing: whether results share memory with operands.
        grad_enabled: whether gradients were enabled, which changes the computation of some operators.
    """

    number: int
    operator: str
    args: list[Template]
    kwargs: dict[str, Template]
    operands: int
    results: list[tuple[int, ...]]
    expected: list[WireMetadata | None]
    mutated: list[int]
    written: list[int]
    aliasing: bool
    grad_enabled: bool


class ProgramStep(NamedTuple):
    """A command of a program.

    Attributes:
        numbers: the command as it was in the log.
        operands, results: pairs of the position of an id among the numbers and its slot.
        scalars: the scalars of the command.
    """

    numbers: tuple[int, ...]
    operands: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    scalars: bytes


class Recipe(NamedTuple):
    """The definition of a program (a recorded step), as sent to nodes.

    A *slot* stands for a tensor: first the inputs, then the outside tensors, then the tensors made by the
    steps. It may belong to another space of the node.

    Attributes:
        number: number of the command that runs it; followed by the ids of inputs, `given`, and `results`.
        inputs: the space of each input.
        outside: space and id of tensors that are used and are the same in every replay.
        steps: the commands.
        given: slot and space of tensors that get a new id in another space in every replay.
        results: slots of tensors that get a new id in every replay.
        kept: slot, space and id of tensors that have the same id in every replay.
        taken: outside tensors that are not used after the program.
    """

    number: int
    inputs: tuple[int, ...]
    outside: tuple[tuple[int, int], ...]
    steps: tuple[ProgramStep, ...]
    given: tuple[tuple[int, int], ...]
    results: tuple[int, ...]
    kept: tuple[tuple[int, int, int], ...]
    taken: tuple[tuple[int, int], ...]


#: failure number that stands for the loss of the node
LOST = -1


class OperationFailure(NamedTuple):
    """An operation that failed on a node.

    Attributes:
        poison: number of the failure in the session.
        stream, batch, segment: its place in the log.
        position: index among the segment's interned calls; -1: not an interned call.
        operator, operands: the operator, and a description of the operands.
        error, traceback: texts.
        alone: True if it poisoned no tensor, as for an assertion.
        of: node and number of the failure that caused it, number LOST if that node was lost; None: none.
        step: index of the step, if the call ran a program; else -1.
        before: text of the commands before it.
    """

    poison: int
    stream: int
    batch: int
    segment: int
    position: int
    operator: str
    operands: str
    error: str
    traceback: str
    alone: bool
    of: tuple[int, int] | None = None
    step: int = -1
    before: str = ""
