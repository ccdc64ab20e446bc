"""A node's half of recorded steps: the recorded log is compiled to one function.

The function is straight-line Python over local variables, with one line per command. A variable is deleted on
the line of its last use, so a replay uses no more memory than single commands. If a line fails, the following
ones are executed as single commands (:meth:`Program.resume`): results that depend on the failure are
poisoned, the others are computed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from types import CodeType, TracebackType
from typing import Any, Protocol

import torch

from ..protocol.commands import SHARE, Definition, ProgramStep, Recipe
from .compiled import Run, call_text, kinds_of
from .memory import SessionEnded


class Node(Protocol):
    """The interface of a space on a node for programs; see :class:`.execute.Tensors`."""

    device: torch.device
    tensors: list[Any]
    calls: dict[int, tuple[Run, int, int]]
    plain: dict[int, tuple[Definition, Any]]

    def fail(
        self,
        a: list[int],
        p: int,
        position: int,
        error: BaseException,
        step: int = -1,
        within: list[Any] | None = None,
    ) -> None: ...

    def tensors_of(self, space: int) -> list[Any]: ...

    def hold(self, space: int, id: int, value: Any) -> None: ...


class Program:
    """A compiled recipe; `run` takes the arguments of an interned call, `width` is its command's length."""

    def __init__(self, recipe: Recipe, node: Node) -> None:
        self.recipe = recipe
        self.width = 1 + len(recipe.inputs) + len(recipe.given) + len(recipe.results)
        self._source = _ProgramText(recipe, node)
        self.run = self._source.compiled()
        self._code: CodeType = self.run.__code__

    def resume(self, node: Node, a: Sequence[int], p: int, position: int, error: BaseException) -> None:
        """Execute the steps from the failed one on as single commands, after `error`."""
        recipe = self.recipe
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self._code:
            trace = trace.tb_next
        if trace is None:
            raise error
        failed, held = self._source.step_of(trace.tb_lineno), _locals(trace)
        t = node.tensors
        made = sum(len(step.results) for step in recipe.steps)
        mine: list[Any] = [None] * (len(recipe.inputs) + len(recipe.outside) + made)
        for slot, value in held.items():
            mine[slot] = value
        for index in range(failed, len(recipe.steps)):
            step = recipe.steps[index]
            if step.numbers[0] == SHARE:
                mine[step.results[0][1]] = mine[step.operands[0][1]]
                continue
            numbers = list(step.numbers)
            for at, slot in (*step.operands, *step.results):
                numbers[at] = slot
            if index > failed:
                try:
                    node.calls[numbers[0]][0](mine, numbers, 0, _scalars(step), 0)
                    continue
                except SessionEnded:
                    raise
                except BaseException as later:
                    error = later
            node.fail(numbers, 0, position, error, index, mine)
        first = p + 1 + len(recipe.inputs)
        for at, (slot, space) in enumerate(recipe.given):
            node.hold(space, a[first + at], mine[slot])
        for at, slot in enumerate(recipe.results, len(recipe.given)):
            t[a[first + at]] = mine[slot]
        for slot, space, id in recipe.kept:
            node.hold(space, id, mine[slot])


def _locals(trace: TracebackType) -> dict[int, Any]:
    """Return the slots that the function held when it failed."""
    values = trace.tb_frame.f_locals
    return {int(name[1:]): value for name, value in values.items() if name[0] == "v"}


def _scalars(step: ProgramStep) -> list[float]:
    return array("d", step.scalars).tolist()


class _ProgramText:
    """The source text of a program's function."""

    def __init__(self, recipe: Recipe, node: Node) -> None:
        self._node = node
        self._names: dict[str, Any] = {"device": node.device, "int": int}
        self._tables: dict[int, str] = {}
        self._lines = ["def run(t, a, p, s, q):"]
        last = {slot: i for i, step in enumerate(recipe.steps) for _, slot in (*step.operands, *step.results)}
        after = [*recipe.results, *(slot for slot, _ in recipe.given), *(slot for slot, _, _ in recipe.kept)]
        last.update(dict.fromkeys(after, len(recipe.steps)))
        places = [(space, f"a[p+{at}]") for at, space in enumerate(recipe.inputs, 1)]
        places += [(space, str(id)) for space, id in recipe.outside]
        for slot, (space, place) in enumerate(places):
            if slot in last:
                self._lines.append(f"    v{slot} = {self._table(space)}[{place}]")
        # Tensors of the last replay are freed before the steps, as in calls without replay.
        kept = [(space, id) for _, space, id in recipe.kept]
        for space, id in kept:
            if len(node.tensors_of(space)) <= id:
                node.hold(space, id, None)
        stale = [each for each in kept if each not in recipe.outside]
        self._lines += [f"    {self._table(space)}[{id}] = None" for space, id in (*stale, *recipe.taken)]
        self._first = len(self._lines) + 1
        dying: list[list[int]] = [[] for _ in range(len(recipe.steps) + 1)]
        for slot, index in last.items():
            dying[index].append(slot)
        for index, step in enumerate(recipe.steps):
            parts = self._step(step)
            if dying[index]:
                parts.append("del " + ", ".join(f"v{slot}" for slot in dying[index]))
            self._lines.append("    " + "; ".join(parts))
        first = 1 + len(recipe.inputs)
        for at, (slot, space) in enumerate(recipe.given, first):
            self._lines.append(f"    {self._named(node.hold)}({space}, a[p+{at}], v{slot})")
        for at, slot in enumerate(recipe.results, first + len(recipe.given)):
            self._lines.append(f"    t[a[p+{at}]] = v{slot}")
        self._lines += [f"    {self._table(space)}[{id}] = v{slot}" for slot, space, id in recipe.kept]
        if len(self._lines) == 1:
            self._lines.append("    pass")

    def compiled(self) -> Run:
        exec(compile("\n".join(self._lines), "<recorded step>", "exec"), self._names)
        return self._names["run"]  # type: ignore[no-any-return]

    def _table(self, space: int) -> str:
        """Return the name of the list of a space's tensors in the text."""
        if space not in self._tables:
            tensors = self._node.tensors_of(space)
            self._tables[space] = "t" if tensors is self._node.tensors else self._named(tensors)
        return self._tables[space]

    def step_of(self, line: int) -> int:
        """Return the index of the step on a line."""
        return line - self._first

    def _step(self, step: ProgramStep) -> list[str]:
        operands = [f"v{slot}" for _, slot in step.operands]
        results = [f"v{slot}" for _, slot in step.results]
        if step.numbers[0] == SHARE:
            return [f"{results[0]} = {operands[0]}"]
        plain = self._node.plain.get(step.numbers[0])
        if plain is None:
            return [self._whole(step, operands, results)]
        definition, operator = plain
        op = self._named(operator)
        before, call = call_text(definition, op, operands, self._literals(definition, step), self._names)
        parts, mutated = list(before), [f"m{at}" for at in definition.mutated]
        made = results[: len(definition.results)]
        if definition.results == [()]:
            parts.append(f"{made[0]} = {call}")
        elif definition.results == [(i,) for i in range(len(made))] and len(made) > 1:
            # the return value may have more items, which are not tensors
            parts.append(f"r = {call}")
            parts += [f"{name} = r[{i}]" for i, name in enumerate(made)] + ["del r"]
        elif made:
            parts.append(f"r = {call}")
            paths = ("".join(f"[{i}]" for i in path) for path in definition.results)
            parts += [f"{name} = r{path}" for name, path in zip(made, paths, strict=True)] + ["del r"]
        else:
            parts.append(call)
        for name, held in zip(results[len(made) :], mutated, strict=True):
            parts.append(f"{name} = {held}; del {held}")
        return parts

    def _whole(self, step: ProgramStep, operands: list[str], results: list[str]) -> str:
        """Return the text of a command that is executed as in the log: a checked call, or not a call."""
        numbers, scalars, calls = list(step.numbers), _scalars(step), self._node.calls
        for i, (at, _) in enumerate((*step.operands, *step.results)):
            numbers[at] = i
        number, count, empty = step.numbers[0], len(operands), [None] * len(results)

        def whole(*given: Any) -> list[Any]:
            held = [*given, *empty]
            calls[number][0](held, numbers, 0, scalars, 0)
            return held[count:]

        call = f"{self._named(whole)}({', '.join(operands)})"
        return f"[{', '.join(results)}] = {call}" if results else call

    def _literals(self, definition: Definition, step: ProgramStep) -> list[str]:
        kinds = [kind for each in (*definition.args, *definition.kwargs.values()) for kind in kinds_of(each)]
        return [
            self._literal(int(value) if kind == "int" else value)
            for kind, value in zip(kinds, _scalars(step), strict=True)
        ]

    def _literal(self, value: float) -> str:
        return repr(value) if math.isfinite(value) else self._named(value)

    def _named(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name
