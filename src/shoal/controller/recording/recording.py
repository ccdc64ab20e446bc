"""The log of one call of a recorded step, and the comparison of the logs of two calls.

In a recording each tensor has a *name* that is the same in the next call: the argument that it is, the
number of the command's result, or, if it existed before, its space and id.
"""

from __future__ import annotations

import gc
import math
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import RecordingMismatch
from ..commands.origin import Origin, current_origin, format_origin
from ..commands.space import Space
from ..protocol.commands import (
    CALL,
    DEFINE,
    DROP,
    ERASE,
    FETCH,
    FIRST,
    FORGET,
    ITEM,
    PROGRAM,
    PUT,
    SEED,
    SHARE,
    WAIT,
)
from ..protocol.metadata import format_metadata
from ..tensor.tensor import TensorHandle
from .effects import memory_of, version_of

#: ("input", leaf), ("upload", leaf, part of it, count), ("number", dtype, value, count), ("made", count), or
#: ("outside", space, id)
Name = tuple[Any, ...]


#: part of a tensor of the master: element offset relative to the tensor, shape and strides
Part = tuple[int, tuple[int, ...], tuple[int, ...]]

#: commands that recordings ignore
_IGNORED_COMMANDS = frozenset({DEFINE, FORGET, PROGRAM, ERASE, PUT, DROP})


class Command(NamedTuple):
    """A command of a log, with names instead of ids.

    Attributes:
        space: number of the space of the log.
        numbers: the numbers of the command, with zeros instead of ids.
        operands, results: (position among the numbers, name) of each tensor.
        scalars: the scalars of the command, packed.
    """

    space: int
    numbers: tuple[int, ...]
    operands: tuple[tuple[int, Name], ...]
    results: tuple[tuple[int, Name], ...]
    scalars: bytes


class Recording:
    """Listener that records the commands that one thread's call appends to the logs of all spaces.

    Attributes:
        commands: the commands so far.
        origins: the program's line for each command.
        names: names of inputs, created and uploaded tensors, by space and id.
        homes: the space number of each named tensor.
        spaces: all recorded spaces, by number.
        forgotten: whether interned calls were discarded meanwhile.
        refusal: the error, if the call did something that cannot be replayed.
        awaited: number of bytes that each space receives from others.
        constants: values in the call's result other than tensors.
        generator: state of the CPU's random generator after the call, if the call changed it.
        read: positions of the master's tensors among the arguments whose elements the call read.
    """

    def __init__(
        self,
        spaces: Iterable[Space],
        inputs: dict[tuple[int, int], Name],
        uploads: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        self.commands: list[Command] = []
        self.origins: list[Origin | None] = []
        self.names = dict(inputs)
        self.homes = {name: space for (space, _), name in inputs.items()}
        self._thread = threading.get_ident()
        self._uploads = [(i, leaf, memory_of(leaf), version_of(leaf)) for i, leaf in uploads]
        self._made = self._uploaded = 0
        #: the tensor of a place that was named last, and the numbers of the spaces that shared their part
        self._joined: tuple[Name, set[int]] = ((), set())
        self.spaces = {space.number: space for space in spaces}
        self.forgotten = False
        self.refusal: RecordingMismatch | None = None
        self.awaited: Counter[int] = Counter()
        self.constants: list[Any] = []
        self.generator: torch.Tensor | None = None
        self.read: frozenset[int] = frozenset()

    def named(self, space: int, id: int) -> Name:
        """Return the name of a tensor."""
        return self.names.get((space, id)) or ("outside", space, id)

    def place(self, handle: TensorHandle) -> tuple[int, int] | None:
        """Return the space number and id of a tensor; None if its space was replaced and it is lost."""
        space = handle.space
        return (space.number, handle.id) if self.spaces.get(space.number) is space else None

    def operator(self, command: Command) -> str:
        """Return the name of a command's operator."""
        key = self._key(command)
        return "a command" if key is None else key[0].name.replace("::", ".")

    def values(self, command: Command) -> list[float]:
        """Return the numeric arguments of a command."""
        given = [name[2] for _, name in command.operands if name[0] == "number"]
        held = [each for each in self._key(command) or () if type(each) in (int, float)]
        return array("d", command.scalars).tolist() + given + held

    def _key(self, command: Command) -> tuple[Any, ...] | None:
        table = self.spaces[command.space].calls.items()
        found = (key for key, call in table if call is not None and call.number == command.numbers[0])
        return next(found, None) if command.numbers[0] >= FIRST else None

    # -- notifications of the spaces; the caller holds the master's lock -----------------------------

    def issued(
        self,
        space: Space,
        number: int,
        ids: list[int],
        made: list[int],
        scalars: list[float],
        origin: Origin | None,
    ) -> None:
        """Record an interned call."""
        if threading.get_ident() != self._thread:
            for id in made:  # may be one that this thread freed
                self.names.pop((space.number, id), None)
            return
        operands = tuple((at, self.named(space.number, id)) for at, id in enumerate(ids, 1))
        results = tuple((at, self._new(space.number, id)) for at, id in enumerate(made, 1 + len(ids)))
        self._add(space, [number, *ids, *made], operands, results, scalars, origin)

    def _new(self, space: int, id: int) -> Name:
        name = self.names[space, id] = ("made", self._made)
        self.homes[name] = space
        self._made += 1
        return name

    def _add(
        self,
        space: Space,
        numbers: Sequence[int],
        operands: tuple[tuple[int, Name], ...],
        results: tuple[tuple[int, Name], ...],
        scalars: Sequence[float],
        origin: Origin | None,
    ) -> None:
        plain = list(numbers)
        for at, _ in (*operands, *results):
            plain[at] = 0
        packed = array("d", scalars).tobytes()
        self.commands.append(Command(space.number, tuple(plain), operands, results, packed))
        self.origins.append(origin)

    def _shared(self, space: Space, numbers: Sequence[int]) -> None:
        """Record that a tensor got an id in another space, a place's if several nodes share a part."""
        _, source, id, target, new = numbers
        name, given = self._joined
        if self.names.get((target, new)) != name or space.number in given:
            name, given = self._joined = self._new(target, new), set()
        given.add(space.number)
        operand = self.named(source, id)
        self._add(space, numbers, ((2, operand),), ((4, name),), (), current_origin())

    def uploaded(self, space: Space, id: int, value: torch.Tensor) -> None:
        """Record the upload of a tensor; refuse it unless it is an argument or a number."""
        if threading.get_ident() != self._thread:
            self.names.pop((space.number, id), None)
            return
        self._uploaded += 1
        if value.requires_grad and torch.is_grad_enabled():
            raise self._refused(
                f"a tensor of the master that requires a gradient is moved to {space.device}",
                "a replay would not set its grad: detach() it, or keep it on the node",
            )
        name: Name
        found = self._argument(value)
        if found is not None:
            name = ("upload", *found, self._uploaded)
        elif not value.dim():
            number = value.item()
            name = ("number", value.dtype, math.nan if number != number else number, self._uploaded)
        else:
            raise self._refused(
                f"{format_metadata(value)} of the master is moved to {space.device}",
                "make it an argument of the function, which is moved in every call, or move it before the "
                "function is called",
            )
        self.names[space.number, id] = name
        self.homes[name] = space.number

    def _argument(self, value: torch.Tensor) -> tuple[int, Part | None] | None:
        """Return the position of the argument that contains this tensor, and the part of it."""
        storage, offset, shape, stride, dtype = memory = memory_of(value)
        for i, leaf, its, version in self._uploads:
            if its[0] != storage or its[-1] != dtype or version_of(leaf) != version:
                continue
            if its == memory:
                return i, None
            first, last = _extent(offset, shape, stride)
            start, end = _extent(*its[1:4])
            if start <= first and last <= end and not (value.is_conj() or value.is_neg()):
                return i, (offset - its[1], tuple(shape), tuple(stride))
        return None

    def copy_expected(self, space: Space, bytes: int) -> None:
        """Record that the nodes of a space will receive this many bytes."""
        if threading.get_ident() == self._thread:
            self.awaited[space.number] += bytes

    def command_issued(self, space: Space, numbers: Sequence[int]) -> None:
        """Record a command other than a call; refuse it if it cannot be replayed."""
        self.forgotten |= numbers[0] == FORGET
        if threading.get_ident() != self._thread or numbers[0] in _IGNORED_COMMANDS:
            return
        if numbers[0] == SEED:
            self._add(space, numbers, (), (), (), current_origin())
        elif numbers[0] in (FETCH, ITEM):
            raise self._refused(
                "item(), tolist(), cpu(), numpy(), bool(), float() or print waits for a tensor",
                "return the tensor, and read it after the call",
            )
        elif numbers[0] == WAIT:
            raise self._refused(
                "a stream or an event is used, and replays run on the default streams",
                "use streams and events outside the function",
            )
        elif numbers[0] == CALL:
            raise self._refused("a function is called on its node", "call it before or after the step")
        elif numbers[0] == SHARE:
            self._shared(space, numbers)
        else:
            raise self._refused(
                "the program waits for its node (a shape that depends on elements, or the random state)",
                "move it out of the function; torch.where instead of a mask has a known shape, and "
                "torch.utils.checkpoint takes preserve_rng_state=False",
            )

    def _refused(self, what: str, remedy: str) -> RecordingMismatch:
        self.refusal = RecordingMismatch(
            f"a recorded step cannot be replayed: {what}, at {format_origin(current_origin())}: {remedy}"
        )
        return self.refusal


def _extent(offset: int, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    return offset, offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def difference(before: Recording, after: Recording) -> str | None:
    """Describe the first difference of two recordings, with the remedy, or return None."""
    if before.commands == after.commands:
        return None
    for i, (a, b) in enumerate(zip(before.commands, after.commands, strict=False)):
        if a == b:
            continue
        where = f"{after.operator(b)} at {format_origin(after.origins[i])}"
        was, now = before.values(a), after.values(b)
        other = next(((x, y) for x, y in zip(was, now, strict=False) if x != y or x != x), None)
        if other is not None and len(was) == len(now) and before.operator(a) == after.operator(b):
            return (
                f"{where} has {other[1]}, and had {other[0]} in the previous call: numbers of a recorded "
                "step must stay the same. Adam and similar optimizers count their steps on the node with "
                "fused=True or capturable=True; a learning rate that changes in every call can be a tensor "
                "on the node, lr=torch.tensor(..., device=...)"
            )
        if a.space != b.space or a.numbers != b.numbers:
            return (
                f"{where} was {before.operator(a)} at {format_origin(before.origins[i])} in the previous "
                "call, or had other shapes: a step must issue the same operations in every call"
            )
        return (
            f"{where} uses another tensor than in the previous call: pass the tensor as an argument, or "
            "write to it in place"
        )
    longer = max(before, after, key=lambda each: len(each.commands))
    i = min(len(before.commands), len(after.commands))
    return (
        f"{longer.operator(longer.commands[i])} at {format_origin(longer.origins[i])} is in one of two calls "
        "only: a step must issue the same operations in every call"
    )


def alive(recording: Recording) -> dict[Name, TensorHandle]:
    """Handles, by name, of tensors that the recorded call created and that are still held."""
    found = {}
    for each in gc.get_objects():
        if type(each) is TensorHandle:
            place = recording.place(each)
            name = None if place is None else recording.names.get(place)
            if name is not None and name[0] != "input":
                found[name] = each
    return found
