"""A recording that became a program: what is sent for a call, and what the call then returns.

The log is cut into *parts*, each the commands between two changes of the space; a part is one command of its
space.  Of the tensors that the recorded call made, those that it returned are made anew by every replay, and
what something else still holds (gradients, state) keeps its id: a replay writes over it.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from .commands import FIRST
from .dispatch import upload
from .guards import PLAIN, Guards
from .history import Kind
from .interrupts import undisturbed
from .issuing import Origin
from .metadata import Metadata
from .program import Recipe, Step
from .recording import Command, Name, Recording, alive
from .space import Space
from .tensor import Handle, RemoteTensor, share

#: in the place of what a call returns
FORGOTTEN = object()

#: in the place of what nobody asks for
_UNKNOWN: Any = None

_Build = Callable[[dict[Name, Handle], Sequence[Any]], Any]


def flatten(value: Any, key: list[Any], leaves: list[Any], others: list[Any]) -> None:
    """Take arguments apart: tensors, what a call of the same kind has equal, and objects."""
    kind = type(value)
    if kind is RemoteTensor:
        required = value.requires_grad
        key += (value.handle.metadata, required)
        if required and value.is_leaf:  # a parameter
            key.append(id(value))
            others.append(value)
        leaves.append(value)
    elif kind is tuple or kind is list:
        key += (kind, len(value))
        for each in value:
            flatten(each, key, leaves, others)
    elif kind is dict:
        key += (kind, len(value))
        for name, each in value.items():
            key.append(name)
            flatten(each, key, leaves, others)
    elif kind in PLAIN:
        key += (kind, value)
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
        key += (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        leaves.append(value)
    else:
        key += (kind, id(value))
        others.append(value)


class Part(NamedTuple):
    """One command of a program.

    Attributes:
        space: whose command it is.
        key: in the space's table of calls, which loses it when the nodes forget it.
        number: of the command.
        inputs: names of its operands.
        given: names of what it gives to other spaces, those, and their metadata.
        results: names of its results, and their metadata.
        origins: the program's line of each step.
    """

    space: Space
    key: tuple[str, object]
    number: int
    inputs: list[Name]
    given: list[tuple[Name, Space, Metadata]]
    results: list[tuple[Name, Metadata]]
    origins: list[Origin | None]

    @property
    def is_there(self) -> bool:
        """Whether its nodes know it; the caller holds the lock."""
        return self.space.lost is None and self.space.calls.get(self.key) is self

    def issue(self, made: dict[Name, Handle], leaves: Sequence[Any]) -> None:
        """Append it to the log; ``made`` has what came before and gets its results."""
        space = self.space
        given = [leaves[name[1]].handle.id if name[0] == "input" else made[name].id for name in self.inputs]
        for name, other, known in self.given:
            if name not in made:  # another node of the place may have given its part
                made[name] = Handle(other, other.new_id(), known)
            given.append(made[name].id)
        ids = space.issue(self.number, given, [], len(self.results), self.origins, len(self.origins))
        for (name, known), id in zip(self.results, ids, strict=True):
            made[name] = Handle(space, id, known)


class _Ended(torch.autograd.Function):
    """A result that needed a gradient in the recording: its graph was there."""

    @staticmethod
    def forward(ctx: Any, tensor: RemoteTensor, anchor: torch.Tensor) -> RemoteTensor:
        return share(tensor.handle)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "a result of a recorded step has no graph: call backward() inside the function that is recorded"
        )


_anchor = torch.zeros((), requires_grad=True)


def _result(handle: Handle, graph: bool) -> RemoteTensor:
    made = share(handle)
    if not graph:
        return made
    with torch.enable_grad():
        return _Ended.apply(made, _anchor)  # type: ignore[no-any-return, no-untyped-call]


class Results:
    """What a call returned, without its tensors.

    Attributes:
        names: of the tensors that it made and nothing else holds.
        constants: what else it returned.
    """

    def __init__(self, recording: Recording, result: Any, leaves: Sequence[Any], static: set[Handle]) -> None:
        self._recording = recording
        self._static = static
        self._leaves = {id(each): i for i, each in enumerate(leaves)}
        self.names: list[Name] = []
        self.constants: list[Any] = []
        self.handles: dict[Name, Handle] = {}
        self.build = self._built(result)

    def _built(self, value: Any) -> _Build:
        kind = type(value)
        if id(value) in self._leaves:
            at = self._leaves[id(value)]
            return lambda made, leaves: leaves[at]
        if kind is RemoteTensor:
            handle = value.handle
            name = self._recording.named(handle.space.number, handle.id)
            if name[0] == "input":
                position = name[1]
                return lambda made, leaves: share(leaves[position].handle)
            graph = value.grad_fn is not None
            if name[0] == "outside" or handle in self._static:
                return (lambda made, leaves: _result(handle, True)) if graph else lambda made, leaves: value
            self.names.append(name)
            self.handles[name] = handle
            return lambda made, leaves: _result(made[name], graph)
        if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(value, "_fields")):
            parts = [self._built(each) for each in value]
            if kind is list:
                return lambda made, leaves: [part(made, leaves) for part in parts]
            make = kind if kind is tuple else kind._make
            return lambda made, leaves: make([part(made, leaves) for part in parts])
        if kind is dict:
            named = {name: self._built(each) for name, each in value.items()}
            return lambda made, leaves: {name: part(made, leaves) for name, part in named.items()}
        self.constants.append(value)
        return lambda made, leaves: value

    def differ(self, constants: Sequence[Any]) -> bool:
        """Whether another call returned something else, beside tensors of nodes."""
        return len(constants) != len(self.constants) or any(
            a is not b and (type(a) is not type(b) or type(a) not in PLAIN or a != b)
            for a, b in zip(constants, self.constants, strict=True)
        )


#: of programs that nothing has any more
_ended: deque[Part] = deque()


def erase_ended() -> None:
    """Let the nodes forget programs that nothing has any more; the caller holds the lock."""
    while _ended:
        part = _ended.popleft()
        space = part.space
        if part.is_there:
            space.calls[part.key] = None  # no other call gets its number
            space.erase(part.number)


class Replay:
    """A program of a recorded step.

    Attributes:
        parts: its commands.
        results: what a call returns.
    """

    def __init__(
        self,
        recording: Recording,
        guards: Guards,
        had_grads: dict[int, bool],
        leaves: Sequence[Any],
        results: Results,
        written: tuple[list[RemoteTensor], list[int]],
    ) -> None:
        self._guards = guards
        self._build = results.build
        self._handles = guards.handles
        self._fixed = {i: each.handle for i, each in enumerate(leaves) if _is_one_of(each, self._handles)}
        self._pattern = _pattern(leaves)
        self._grads = [(*each, had_grads[id(each[0])]) for each in guards.grads]
        self._made_grads = [
            (tensor, grad) for tensor, grad, _, had in self._grads if not had and grad is not None
        ]
        self._ended_grads = [tensor for tensor, grad, _, had in self._grads if had and grad is None]
        self._held = self._still_held(recording, results)
        used = {name for each in recording.commands for _, name in each.operands} | set(results.names)
        self._uploads = [(name, space) for name, space in recording.moved.items() if name in used]
        self._written, self._written_leaves = written
        self._generator = recording.generator
        self._awaited = [(recording.spaces[number], bytes) for number, bytes in recording.awaited.items()]
        self._crossing: dict[Name, Handle] = {}
        self.parts = self._cut(recording, results)
        # A tensor of the master whose elements no node got must stay the same.
        moved = {name[1] for name in recording.moved if name[0] == "upload"}
        self._equal = [
            (i, each.detach().clone())
            for i, each in enumerate(leaves)
            if type(each) is not RemoteTensor and i not in moved
        ]

    # -- calls -----------------------------------------------------------------------------------

    def stands_for(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with such arguments would now issue what the program does."""
        if not all(part.is_there for part in self.parts):
            return False
        handles = self._handles
        for i, leaf in enumerate(leaves):
            if (
                type(leaf) is RemoteTensor
                and leaf.handle is not self._fixed.get(i)
                and leaf.handle in handles
            ):
                return False
        for i, handle in self._fixed.items():
            if leaves[i].handle is not handle:
                return False
        if len(leaves) > 1 and _pattern(leaves) != self._pattern:
            return False
        for i, value in self._equal:
            if not torch.equal(leaves[i], value):
                return False
        for tensor, grad, handle, had in self._grads:
            now: Any = tensor.grad
            if now is None:
                if had:
                    return False
            elif not had or (grad is not None and (now is not grad or now.handle is not handle)):
                return False
        return self._guards.changed() is None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Send the program; what the call returns, or FORGOTTEN if the nodes have been told to forget it."""
        made: dict[Name, Handle] = {}
        for name, space in self._uploads:
            value = leaves[name[1]] if name[0] == "upload" else torch.tensor(name[2], dtype=name[1])
            made[name] = upload(space, value).handle
        for space, bytes in self._awaited:
            with space.lock:
                space.expect(bytes)

        def issue() -> None:
            for part in self.parts:
                part.issue(made, leaves)

        with self.parts[0].space.lock:
            if not all(part.is_there for part in self.parts):
                return FORGOTTEN
            if len(self.parts) == 1:
                issue()
            else:
                undisturbed(issue)  # or one node would send what none awaits
        if self._written or self._written_leaves:  # a graph that was made before must not be used now
            increment_version([*self._written, *(leaves[i] for i in self._written_leaves)])
        if self._generator is not None:
            torch.set_rng_state(self._generator)
        for tensor, grad in self._made_grads:
            tensor.grad = grad
        for tensor in self._ended_grads:
            tensor.grad = None
        return self._build(made, leaves)

    def __del__(self) -> None:
        _ended.extend(self.__dict__.get("parts", ()))  # in whatever thread this is: nothing else

    # -- making ----------------------------------------------------------------------------------

    def _still_held(self, recording: Recording, results: Results) -> dict[Name, Handle]:
        """Tensors that the call made, did not return, and that are still held by something."""
        gradients = {handle for _, _, handle in self._guards.grads}

        def found() -> dict[Name, Handle]:
            return {name: each for name, each in alive(recording).items() if name not in results.handles}

        held = found()
        if not gradients.issuperset(held.values()):
            gc.collect()  # what only a cycle holds is not to be kept for ever
            held = found()
        return held

    def _cut(self, recording: Recording, results: Results) -> list[Part]:
        runs: list[tuple[int, list[tuple[Command, Origin | None]]]] = []
        for command, origin in zip(recording.commands, recording.origins, strict=True):
            if not runs or runs[-1][0] != command.space:
                runs.append((command.space, []))
            runs[-1][1].append((command, origin))
        last: dict[Name, int] = {}
        for at, (_, commands) in enumerate(runs):
            last.update({name: at for each, _ in commands for _, name in each.operands})
        return [
            self._part(recording, recording.spaces[number], commands, at, last, results.handles)
            for at, (number, commands) in enumerate(runs)
        ]

    def _part(
        self,
        recording: Recording,
        space: Space,
        commands: Sequence[tuple[Command, Origin | None]],
        at: int,
        last: dict[Name, int],
        returned: dict[Name, Handle],
    ) -> Part:
        homes = recording.homes
        made = {name: None for each, _ in commands for _, name in each.results}
        used = {name: None for each, _ in commands for _, name in each.operands if name not in made}
        inputs = [name for name in used if name[0] in ("input", "upload", "number")]
        outside: dict[Name, tuple[int, int]] = {}
        taken = []
        for name in used:
            if name[0] == "outside":
                outside[name] = name[1:]
            elif name[0] == "made":
                held = self._held.get(name) or self._crossing[name]
                outside[name] = held.space.number, held.id
                if name not in self._held and last[name] == at:
                    taken.append(outside[name])
        slots = {name: slot for slot, name in enumerate([*inputs, *outside, *made])}
        kept = []
        for name in made:
            keeping = self._held.get(name)
            if keeping is None and last.get(name, at) > at:
                keeping = self._crossing.get(name)
                if keeping is None:
                    home = recording.spaces[homes[name]]
                    keeping = self._crossing[name] = Handle(home, home.new_id(), _UNKNOWN)
            if keeping is not None:
                kept.append((slots[name], keeping.space.number, keeping.id))
        results = [name for name in returned if name in made and homes[name] == space.number]
        given = [name for name in returned if name in made and homes[name] != space.number]
        steps = tuple(
            Step(
                each.numbers,
                tuple((position, slots[name]) for position, name in each.operands),
                tuple((position, slots[name]) for position, name in each.results),
                each.scalars,
            )
            for each, _ in commands
        )
        number = FIRST + len(space.calls)
        recipe = Recipe(
            number,
            tuple(homes[name] for name in inputs),
            tuple(outside.values()),
            steps,
            tuple((slots[name], homes[name]) for name in given),
            tuple(slots[name] for name in results),
            tuple(kept),
            tuple(taken),
        )
        space.program(tuple(recipe))
        part = Part(
            space,
            ("program", object()),
            number,
            inputs,
            [(name, recording.spaces[homes[name]], returned[name].metadata) for name in given],
            [(name, returned[name].metadata) for name in results],
            [origin for _, origin in commands],
        )
        space.calls[part.key] = part
        space.kinds[number] = Kind(
            "a recorded step", len(inputs) + len(given), len(results), tuple(homes[name] for name in given)
        )
        return part


def _is_one_of(leaf: Any, handles: set[Handle]) -> bool:
    return type(leaf) is RemoteTensor and leaf.handle in handles


def _pattern(leaves: Sequence[Any]) -> list[int]:
    """Which leaves are the same tensor."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(each.handle if type(each) is RemoteTensor else each), i)
        for i, each in enumerate(leaves)
    ]
