"""Replays of recorded steps: the program of a recording, and the result of each call.

The log is cut into *parts* at each change of space; a part is one command of its space. Tensors that the
recorded call created and returned are created by every replay. Tensors that something else still holds
(gradients, state) keep their ids, and replays overwrite them.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ...common.copy_refusal import refuses_copies
from ...common.never_compile import never_compile
from ..commands.history import CallSignature
from ..commands.interrupts import call_without_interrupt, defer_interrupt
from ..commands.origin import Origin
from ..commands.space import Space, apart
from ..commands.storage import Storage, merge_storages
from ..protocol.commands import ERASE, FIRST, PROGRAM, ProgramStep, Recipe
from ..protocol.metadata import Metadata
from ..tensor.dispatch import upload
from ..tensor.tensor import RemoteTensor, TensorHandle
from .effects import memory_of
from .guards import Grad, Guards
from .recording import Command, Name, Recording, alive
from .trees import Results

#: returned instead of a result if the nodes no longer have the program
PROGRAM_DISCARDED = object()

#: metadata of internal tensors, which is never used
_UNKNOWN: Any = None


class Part(NamedTuple):
    """One command of a program.

    Attributes:
        space: the space of the command.
        key: its key in the space's table of calls, which is removed when the nodes discard the command.
        number: command number.
        inputs: names of its operands.
        given: (name, space, metadata) of the results that it shares with other spaces.
        results: (name, metadata) of its own results.
        origins: the program's line for each step.
    """

    space: Space
    key: tuple[str, object]
    number: int
    inputs: list[Name]
    given: list[tuple[Name, Space, Metadata]]
    results: list[tuple[Name, Metadata]]
    origins: list[Origin | None]

    @property
    def is_interned(self) -> bool:
        """Whether the nodes still have it; the caller holds the lock."""
        return self.space.lost is None and self.space.calls.get(self.key) is self

    @defer_interrupt
    def issue(self, made: dict[Name, TensorHandle], leaves: Sequence[Any]) -> None:
        """Append it to the log; `made` has the results of earlier parts and receives its own."""
        space = self.space
        given = [leaves[name[1]].handle.id if name[0] == "input" else made[name].id for name in self.inputs]
        for name, other, known in self.given:
            if name not in made:  # another node of the place may have shared its part
                made[name] = TensorHandle(other, other.new_id(), known)
            given.append(made[name].id)
        ids = space.issue(self.number, given, [], len(self.results), self.origins, len(self.origins))
        for (name, known), id in zip(self.results, ids, strict=True):
            made[name] = TensorHandle(space, id, known)


class _Grad(NamedTuple):
    """Whether `tensor` must have a gradient (`had`), and the one that the program uses (`needed`)."""

    tensor: RemoteTensor
    had: bool
    needed: RemoteTensor | None
    handle: TensorHandle | None


#: parts of programs that were garbage-collected
_ended: deque[Part] = deque()


def erase_ended() -> None:
    """Erase garbage-collected programs on the nodes; the caller holds the lock."""
    while _ended:
        part = _ended.popleft()
        space = part.space
        if part.is_interned:
            space.calls[part.key] = None  # reserves its number
            space.send(ERASE, part.number)


@refuses_copies("a recorded call", "a program at each node", "Record the function again")
class Replay:
    """A program of a recorded step; `parts` are its commands."""

    def __init__(
        self,
        recording: Recording,
        guards: Guards,
        had_grads: dict[int, Grad | None],
        leaves: Sequence[Any],
        results: Results,
        written: tuple[list[RemoteTensor], list[int]],
    ) -> None:
        self._guards = guards
        self._build = results.build
        self._handles = guards.handles
        self._fixed = {
            i: each.handle
            for i, each in enumerate(leaves)
            if type(each) is RemoteTensor and each.handle in self._handles
        }
        self._pattern = _pattern(leaves)
        used = {name for each in recording.commands for _, name in each.operands}
        self._grads: list[_Grad] = []
        self._left: list[tuple[RemoteTensor, RemoteTensor | None, TensorHandle | None]] = []
        for tensor, grad, handle in guards.grads:
            before = had_grads[id(tensor)]
            had = None if before is None else before.tensor
            needed = had if before is not None and ("outside", *before.place) in used else None
            self._grads.append(
                _Grad(tensor, before is not None, needed, None if needed is None else needed.handle)
            )
            if grad is not had or (had is None and before is not None):
                self._left.append((tensor, grad, handle))
        self._held = self._still_held(recording, results)
        used |= set(results.handles)
        self._uploads = [
            (name, recording.spaces[number])
            for name, number in recording.homes.items()
            if name[0] in ("upload", "number") and name in used
        ]
        self._written, self._written_leaves = written
        self._generator = recording.generator
        self._awaited = [(recording.spaces[number], bytes) for number, bytes in recording.awaited.items()]
        self._crossing: dict[Name, TensorHandle] = {}
        self.parts = self._split_by_space(recording, results)
        self._shown = self._shared_storages(leaves, results)
        self._several = False
        # The master's tensors that the recorded call read must be unchanged.
        shared = guards.storages
        self._memory = {
            i: memory
            for i, leaf in enumerate(leaves)
            if type(leaf) is not RemoteTensor and (memory := memory_of(leaf))[0] in shared
        }
        self._equal = [
            (i, each.detach().clone())
            for i, each in enumerate(leaves)
            if type(each) is not RemoteTensor and i in recording.read
        ]

    # -- calls -----------------------------------------------------------------------------------

    def matches(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these arguments would issue the commands of this program."""
        if not all(part.is_interned for part in self.parts):
            return False
        handles = self._handles
        for i, leaf in enumerate(leaves):
            if (
                type(leaf) is RemoteTensor
                and leaf.handle is not self._fixed.get(i)
                and leaf.handle in handles
            ):
                return False
        for i, fixed in self._fixed.items():
            if leaves[i].handle is not fixed:
                return False
        if len(leaves) > 1 and _pattern(leaves) != self._pattern:
            return False
        for i, value in self._equal:
            if not torch.equal(leaves[i], value):
                return False
        for i, memory in self._memory.items():
            if memory_of(leaves[i]) != memory:
                return False
        for tensor, had, needed, handle in self._grads:
            now: Any = tensor.grad
            if (now is not None) is not had:
                return False
            if needed is not None and (now is not needed or now.handle is not handle):
                return False
        for _, grad, handle in self._left:
            if grad is not None and grad.handle is not handle:
                return False
        return self._guards.changed() is None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Send the program; return the call's result, or PROGRAM_DISCARDED if the nodes no longer have it."""
        made: dict[Name, TensorHandle] = {}
        for name, space in self._uploads:
            if name[0] == "number":
                value = torch.tensor(name[2], dtype=name[1], device="cpu")
            else:
                value = leaves[name[1]]
                if name[2] is not None:
                    offset, shape, stride = name[2]
                    value = value.detach().as_strided(shape, stride, value.storage_offset() + offset)
            made[name] = upload(space, value).handle
        for space, bytes in self._awaited:
            with space.lock:
                space.expect(bytes)

        def issue() -> None:
            for part in self.parts:
                part.issue(made, leaves)

        with self.parts[0].space.lock:
            if not all(part.is_interned for part in self.parts):
                return PROGRAM_DISCARDED
            with self._apart(made, leaves):
                if len(self.parts) == 1:
                    issue()
                else:
                    call_without_interrupt(
                        issue
                    )  # all parts or none: a node must not send data that no node awaits
            self._share_memory(made, leaves)
        if self._written or self._written_leaves:  # makes autograd reject graphs made before this call
            increment_version([*self._written, *(leaves[i] for i in self._written_leaves)])
        if self._generator is not None:
            torch.set_rng_state(self._generator)
        for tensor, grad, _ in self._left:
            if tensor.grad is not grad:
                tensor.grad = grad
        return self._build(made, leaves)

    def _share_memory(self, made: dict[Name, TensorHandle], leaves: Sequence[Any]) -> None:
        """Restore which handles share memory, as in the recording."""
        there = {**self._held, **made} if self._shown else {}
        for name, of in self._shown.items():
            shown = (leaves[each] if type(each) is int else there.get(each, each) for each in of)
            storages = [(each.handle if type(each) is RemoteTensor else each).memory() for each in shown]
            there[name].storage = merge_storages(storages)

    def _apart(self, made: dict[Name, TensorHandle], leaves: Sequence[Any]) -> AbstractContextManager[None]:
        """Context that orders the program after and before everything else: its memory use is unknown."""
        if self.parts[0].space.ordering is None:
            return nullcontext()
        for part in self.parts:
            for name in part.inputs:
                handle = leaves[name[1]].handle if name[0] == "input" else made.get(name)
                if handle is not None:
                    handle.memory().past.users.add(handle.space)
        if not self._several:
            self._several = True
            for handle in (*self._handles, *self._held.values(), *self._crossing.values()):
                handle.memory().past.users.add(handle.space)
        return apart(*dict.fromkeys(part.space for part in self.parts))

    @never_compile
    def __del__(self) -> None:
        _ended.extend(self.__dict__.get("parts", ()))  # runs in any thread: do nothing else here

    # -- construction ----------------------------------------------------------------------------

    def _still_held(self, recording: Recording, results: Results) -> dict[Name, TensorHandle]:
        """Tensors that the call created and did not return, and that something still holds."""
        gradients = {handle for _, _, handle in self._guards.grads}

        def found() -> dict[Name, TensorHandle]:
            return {name: each for name, each in alive(recording).items() if name not in results.handles}

        held = found()
        if not gradients.issuperset(held.values()):
            held.clear()
            gc.collect()  # tensors held only by reference cycles would be kept forever
            held = found()
        return held

    def _shared_storages(self, leaves: Sequence[Any], results: Results) -> dict[Name, list[Any]]:
        """For each tensor that shares memory: the handle, argument or result that it shares it with."""
        storages: dict[Storage, list[Any]] = {}  # a handle, the position of an argument, or a name
        static = set(self._held.values())
        for handle in self._handles:
            if handle.storage is not None and handle not in static:
                storages.setdefault(handle.memory(), []).append(handle)
        for i, leaf in enumerate(leaves):
            if type(leaf) is RemoteTensor and leaf.handle.storage is not None:
                storages.setdefault(leaf.handle.memory(), []).append(i)
        shown = {}
        for name, handle in (*self._held.items(), *results.handles.items()):
            if handle.storage is not None:
                of = storages.setdefault(handle.memory(), [name])
                if of != [name]:
                    shown[name] = of
        return shown

    def _split_by_space(self, recording: Recording, results: Results) -> list[Part]:
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
        returned: dict[Name, TensorHandle],
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
                    keeping = self._crossing[name] = TensorHandle(home, home.new_id(), _UNKNOWN)
            if keeping is not None:
                kept.append((slots[name], keeping.space.number, keeping.id))
        results = [name for name in returned if name in made and homes[name] == space.number]
        given = [name for name in returned if name in made and homes[name] != space.number]
        steps = tuple(
            ProgramStep(
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
        space.define(PROGRAM, tuple(recipe))
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
        space.kinds[number] = CallSignature(
            "a recorded step",
            len(inputs) + len(given),
            len(results),
            (),
            tuple(homes[name] for name in given),
        )
        return part


def _pattern(leaves: Sequence[Any]) -> list[tuple[int, int]]:
    """Which leaves are the same tensor, and which are views of the same one."""
    first: dict[Any, int] = {}
    pattern = []
    for i, each in enumerate(leaves):
        if type(each) is RemoteTensor:
            which: Any = id(each.handle)
            whole: Any = id(each._base if each._is_view() else each)
        else:
            which = whole = memory_of(each)
        pattern.append((first.setdefault(which, i), first.setdefault(("whole", whole), i)))
    return pattern
