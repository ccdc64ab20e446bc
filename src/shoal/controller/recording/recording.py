"""The log of one call of a recorded step, and the comparison of two calls' logs.

In a recording every tensor has a *name* that is the same in the next call: the input that it is, which
command made it, or, if it was there before, its space and id.
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
from ..commands.issuing import Origin, issuing_line, shown
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
from ..tensor.tensor import TensorHandle
from .effects import memory_of, version_of

#: ("input", leaf), ("upload", leaf, part of it, count), ("number", dtype, value, count), ("made", count), or
#: ("outside", space, id)
Name = tuple[Any, ...]


#: of a tensor of the master: how far it begins after the tensor, its shape, and its strides
Part = tuple[int, tuple[int, ...], tuple[int, ...]]

#: of no concern to a recording
_SILENT = frozenset({DEFINE, FORGET, PROGRAM, ERASE, PUT, DROP})


class Command(NamedTuple):
    """A command of a log, with names in the place of ids.

    Attributes:
        space: number of the space in whose log it is.
        numbers: as in the log, with zeros in the place of ids.
        operands, results: position among the numbers, and name, of each tensor.
        scalars: of the command.
    """

    space: int
    numbers: tuple[int, ...]
    operands: tuple[tuple[int, Name], ...]
    results: tuple[tuple[int, Name], ...]
    scalars: bytes


class Recording:
    """Listens to what one thread's call appends to the logs of all spaces.

    Attributes:
        commands: so far.
        origins: the program's line of each.
        names: of tensors by space and id: inputs, and what was made or uploaded.
        homes: the number of the space of each tensor that has a name.
        spaces: all that are listened to, by number.
        forgotten: whether calls were forgotten meanwhile.
        refusal: why the call cannot be recorded, once it has done something that no replay can do.
        moved: to which space each tensor of the master was put.
        awaited: bytes that come to each space from others.
        constants: what the call returned beside tensors.
        generator: the state of the processor's random generator after the call, if that has changed it.
        read: positions of arguments, tensors of the master, whose elements the call has looked at here.
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
        #: the tensor of several nodes that was named last, and the nodes that have given their part
        self._joined: tuple[Name, set[int]] = ((), set())
        self.spaces = {space.number: space for space in spaces}
        self.forgotten = False
        self.refusal: RecordingMismatch | None = None
        self.awaited: Counter[int] = Counter()
        self.moved: dict[Name, Space] = {}
        self.constants: list[Any] = []
        self.generator: torch.Tensor | None = None
        self.read: frozenset[int] = frozenset()

    def named(self, space: int, id: int) -> Name:
        """The name of a tensor."""
        return self.names.get((space, id)) or ("outside", space, id)

    def place(self, handle: TensorHandle) -> tuple[int, int] | None:
        """Space and id of a tensor; None: an earlier space had that number, and the tensor is lost."""
        space = handle.space
        return (space.number, handle.id) if self.spaces.get(space.number) is space else None

    def operator(self, command: Command) -> str:
        """A command in words."""
        key = self._key(command)
        return "a command" if key is None else key[0].name.replace("::", ".")

    def values(self, command: Command) -> list[float]:
        """The numbers of a command."""
        given = [name[2] for _, name in command.operands if name[0] == "number"]
        held = [each for each in self._key(command) or () if type(each) in (int, float)]
        return array("d", command.scalars).tolist() + given + held

    def _key(self, command: Command) -> tuple[Any, ...] | None:
        table = self.spaces[command.space].calls.items()
        found = (key for key, call in table if call is not None and call.number == command.numbers[0])
        return next(found, None) if command.numbers[0] >= FIRST else None

    # -- what the spaces tell; the caller holds the master's lock -----------------------------------

    def issued(
        self, space: Space, number: int, ids: list[int], made: list[int], scalars: list[float], origin: Any
    ) -> None:
        """An interned call."""
        numbers, first = [number, *ids, *made], 1 + len(ids)
        self.command(space, numbers, range(1, first), range(first, first + len(made)), scalars, origin)

    def command(
        self,
        space: Space,
        numbers: Sequence[int],
        operands: Sequence[int],
        results: Sequence[int],
        scalars: Sequence[float],
        origin: Origin | None,
    ) -> None:
        """A command; ``operands`` and ``results`` are the positions of ids among its numbers."""
        if threading.get_ident() != self._thread:
            for at in results:  # of an id that this thread had freed, perhaps
                self.names.pop((space.number, numbers[at]), None)
            return
        given = tuple((at, self.named(space.number, numbers[at])) for at in operands)
        made = tuple((at, self._new(space.number, numbers[at])) for at in results)
        self._add(space, numbers, given, made, scalars, origin)

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
        """A tensor of one space is named in another one, which is a place's if several nodes give a part."""
        _, source, id, target, new = numbers
        name, given = self._joined
        if self.names.get((target, new)) != name or space.number in given:
            name, given = self._joined = self._new(target, new), set()
        given.add(space.number)
        operand = self.named(source, id)
        self._add(space, numbers, ((2, operand),), ((4, name),), (), issuing_line())

    def uploaded(self, space: Space, id: int, value: torch.Tensor) -> None:
        """A tensor of the master was put there.

        Raises:
            RecordingMismatch: it is no argument.
        """
        if threading.get_ident() != self._thread:
            self.names.pop((space.number, id), None)
            return
        self._uploaded += 1
        if value.requires_grad and torch.is_grad_enabled():
            raise self._refused(
                f"a tensor of the master that needs a gradient is moved to {space.device}",
                "no replay would set its grad: detach() it, or keep it on the node",
            )
        name: Name
        found = self._argument(value)
        if found is not None:
            name = ("upload", *found, self._uploaded)
        elif not value.dim():
            number = value.item()
            name = ("number", value.dtype, math.nan if number != number else number, self._uploaded)
        else:
            dtype = str(value.dtype).removeprefix("torch.")
            raise self._refused(
                f"{dtype}{list(value.shape)} of the master is moved to {space.device}",
                "make it an argument of the function, whose elements each call moves anew, or move it "
                "before the function is called",
            )
        self.names[space.number, id] = name
        self.homes[name] = space.number
        self.moved[name] = space

    def _argument(self, value: torch.Tensor) -> tuple[int, Part | None] | None:
        """The argument that this is, or is a part of."""
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

    def awaits(self, space: Space, bytes: int) -> None:
        """So much will come to the nodes of a space."""
        if threading.get_ident() == self._thread:
            self.awaited[space.number] += bytes

    def commanded(self, space: Space, numbers: Sequence[int]) -> None:
        """A command that is no call.

        Raises:
            RecordingMismatch: no replay could do it.
        """
        self.forgotten |= numbers[0] == FORGET
        if threading.get_ident() != self._thread or numbers[0] in _SILENT:
            return
        if numbers[0] == SEED:
            self.command(space, numbers, (), (), (), issuing_line())
        elif numbers[0] in (FETCH, ITEM):
            raise self._refused(
                "item(), tolist(), cpu(), numpy(), bool(), float() or print waits for a tensor",
                "return the tensor, and look at it after the call",
            )
        elif numbers[0] == WAIT:
            raise self._refused(
                "a stream or an event is used, and replays run on the default streams",
                "use streams and events outside of the function",
            )
        elif numbers[0] == CALL:
            raise self._refused("a function is called on its node", "call it before or after the step")
        elif numbers[0] == SHARE:
            self._shared(space, numbers)
        else:
            raise self._refused(
                "the program waits for its node (a shape that depends on elements, or the random state)",
                "move it out of the function; a mask with torch.where has a shape that is known, and "
                "torch.utils.checkpoint takes preserve_rng_state=False",
            )

    def _refused(self, what: str, remedy: str) -> RecordingMismatch:
        self.refusal = RecordingMismatch(
            f"a recorded step cannot be replayed: {what}, at {shown(issuing_line())}: {remedy}"
        )
        return self.refusal


def _extent(offset: int, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """The first element of a tensor in its memory, and the last."""
    return offset, offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def difference(before: Recording, after: Recording) -> str | None:
    """Where two recordings differ, with the remedy; None: nowhere."""
    if before.commands == after.commands:
        return None
    for i, (a, b) in enumerate(zip(before.commands, after.commands, strict=False)):
        if a == b:
            continue
        where = f"{after.operator(b)} at {shown(after.origins[i])}"
        was, now = before.values(a), after.values(b)
        other = next(((x, y) for x, y in zip(was, now, strict=False) if x != y or x != x), None)
        if other is not None and len(was) == len(now) and before.operator(a) == after.operator(b):
            return (
                f"{where} has {other[1]}, and had {other[0]} in the call before: numbers of a recorded step "
                "must stay the same.  Adam and its kin count their steps on the node with fused=True or "
                "capturable=True; a rate that changes in every call can be a tensor of the node, "
                "lr=torch.tensor(..., device=...)"
            )
        if a.space != b.space or a.numbers != b.numbers:
            return (
                f"{where} was {before.operator(a)} at {shown(before.origins[i])} in the call before, or of "
                "other shapes: a step must issue the same operations in every call"
            )
        return (
            f"{where} works on another tensor than in the call before, which was made anew: pass it as an "
            "argument, or write to it in place"
        )
    longer = max(before, after, key=lambda each: len(each.commands))
    i = min(len(before.commands), len(after.commands))
    return (
        f"{longer.operator(longer.commands[i])} at {shown(longer.origins[i])} is in one of two calls only: a "
        "step must issue the same operations in every call"
    )


def alive(recording: Recording) -> dict[Name, TensorHandle]:
    """Handles of tensors that the recorded call made and that something holds, by name."""
    found = {}
    for each in gc.get_objects():
        if type(each) is TensorHandle:
            place = recording.place(each)
            name = None if place is None else recording.names.get(place)
            if name is not None and name[0] != "input":
                found[name] = each
    return found
