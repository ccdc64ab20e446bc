"""The words of the master's log: numbers, and how an interned call is described once.

A command is the number of a call, the ids of its operands and the ids that its results get.  Numbers below
``FIRST`` are commands of their own.  A value of a call's description (a *template*) is one of::

    ("tensor",)             the next operand
    ("number", "float")     the next scalar, or "int"
    ("constant", value)
    ("device",)             that of the first operand; the node's processor, if there is none
    ("device", index)       within the node; -1: its processor
    ("list", [templates])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .metadata import WireMetadata

#: FREE id
FREE = 0
#: PUT id, index of a payload: a tensor of the master
PUT = 1
#: FETCH id: its elements go into the reply
FETCH = 2
#: SEED low half, high half
SEED = 3
#: FORGET: all calls
FORGET = 4
#: ASK index of a payload, an operator with templates, ids and scalars: run it now and tell of its results
ASK = 5
#: KEEP id, index of the tensor of what was asked last
KEEP = 6
#: STATE index of a payload: the random generator's state; None: tell it
STATE = 7
#: DEFINE index of a payload, a definition
DEFINE = 8
#: SHARE space, id, space, id: the tensor of the first is the second's too
SHARE = 9
#: PROGRAM index of a payload, a recipe: a recorded step, which runs like an interned call from then on
PROGRAM = 10
#: ERASE number of a program: forget it
ERASE = 11
#: ITEM id: its one element goes into the reply, as a number
ITEM = 12
#: CALL index of a payload, number: run a function of the program, and tell of its result
CALL = 13
#: TAKE id, number, position: the tensor in the result of that call
TAKE = 14
#: DROP number: forget the tensors in the result of that call
DROP = 15
#: WAIT node, space, stream, low half, high half: until a stream of the node has done so many numbers of a log
WAIT = 24
#: RELEASE id, count: FREE by the last one of so many streams
RELEASE = 25
#: MARK id, whether it is for timing: an event
MARK = 26
#: EXPECT number: until the master tells it
EXPECT = 27
#: in the place of a node: each, and none
EVERY_NODE, NO_NODE = 0xFFFFFFFF, 0xFFFFFFFE
#: how many numbers each of these takes
WIDTHS = {
    FREE: 2, PUT: 3, FETCH: 2, SEED: 3, FORGET: 1, ASK: 2, KEEP: 3, STATE: 2, DEFINE: 2, SHARE: 5, PROGRAM: 2,
    ERASE: 2, ITEM: 2, CALL: 3, TAKE: 4, DROP: 2, WAIT: 6, RELEASE: 3, MARK: 3, EXPECT: 2,
}  # fmt: skip
#: number of the first interned call
FIRST = 32

Template = tuple[Any, ...]


def filled(
    args: Sequence[Template],
    kwargs: Mapping[str, Template],
    tensors: Iterable[Any],
    scalars: Iterable[float],
    device: Callable[[Template], Any],
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, of its templates, its tensors and its numbers.

    Args:
        device: gives that of a template of one.
    """
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


#: space, stream, numbers, scalars, high, payloads: what :mod:`shoal.controller.commands.space` sends
Segment = tuple[int, int, bytes, bytes, int, list[Any]]


class Definition(NamedTuple):
    """A call, as a node learns it.

    Attributes:
        number: of the call.
        operator: ``aten::add.Tensor``.
        args, kwargs: templates.
        operands: how many tensors it takes.
        results: where the new tensors are in what the operator returns, a path of indices each.
        expected: metadata of the results; None: only the operator's backward looks at it.
        mutated: the operands whose own metadata it changes: they get new ids, after those of the results.
        aliasing: whether results share memory with operands.
        differentiating: whether gradients were enabled, for operators that compute differently then.
    """

    number: int
    operator: str
    args: list[Template]
    kwargs: dict[str, Template]
    operands: int
    results: list[tuple[int, ...]]
    expected: list[WireMetadata | None]
    mutated: list[int]
    aliasing: bool
    differentiating: bool


class ProgramStep(NamedTuple):
    """A command of a program.

    Attributes:
        numbers: of the command as it was in the log.
        operands, results: the slot of each id among the numbers, by its position there.
        scalars: of the command.
    """

    numbers: tuple[int, ...]
    operands: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    scalars: bytes


class Recipe(NamedTuple):
    """A program, as a node learns it.

    A *slot* stands for a tensor: first the inputs, then the tensors outside, then what the steps make.  The
    tensor may be one of another space of the node.

    Attributes:
        number: of the command that runs it: its number, then the ids of the inputs, of what is given to other
            spaces, and of the results.
        inputs: the space of each.
        outside: space and id of tensors that it uses and that are the same in every replay.
        steps: the commands.
        given: slots of what gets an id of another space in every replay, and that space.
        results: slots of what gets an id in every replay.
        kept: slots of what keeps its id, its space, and the id.
        taken: those outside that nothing after it uses.
    """

    number: int
    inputs: tuple[int, ...]
    outside: tuple[tuple[int, int], ...]
    steps: tuple[ProgramStep, ...]
    given: tuple[tuple[int, int], ...]
    results: tuple[int, ...]
    kept: tuple[tuple[int, int, int], ...]
    taken: tuple[tuple[int, int], ...]


#: in the place of a failure's number: the node died
LOST = -1


class OperationFailure(NamedTuple):
    """An operation that failed on a node.

    Attributes:
        poison: number of the failure in the session.
        stream, batch, segment: where it was.
        position: which of the segment's calls it was, -1 if none.
        operator, operands: what it was, and of what.
        error, traceback: in words.
        alone: whether no tensor is poisoned by it, as of an assertion.
        of: the node where it is known why, and the failure's number there, or LOST; None: here.
        step: which of the program's commands it was, if that call ran a program; else -1.
        before: the commands before it, in words.
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
