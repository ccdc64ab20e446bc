"""Compilation of interned calls and recorded steps to Python functions over the list of a space's tensors.

The function of a recorded step, a *program*, is straight-line Python over local variables, with one line per
command. A variable is deleted on the line of its last use, so a replay uses no more memory than single
commands. If a line fails, the following ones are executed as single commands: results that depend on the
failure are poisoned, the others are computed.
"""

from __future__ import annotations

import keyword
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..protocol.commands import SHARE, Definition, ProgramStep, Recipe, Template
from . import accelerators
from .history import Run
from .session_state import SessionState

CPU = torch.device("cpu")


def _scalar_kinds(templates: Iterable[Template]) -> list[str]:
    """Return the kinds, "float" or "int", of the scalars that templates take."""
    kinds: list[str] = []
    for template in templates:
        if template[0] == "list":
            kinds += _scalar_kinds(template[1])
        elif template[0] == "number":
            kinds.append(template[1])
    return kinds


def _result_lines(call: str, paths: Sequence[tuple[int, ...]], targets: Sequence[str]) -> list[str]:
    """Return the statements that store the results of a call, at `paths` in its return value."""
    if not paths:
        return [call]
    if paths == [()]:
        return [f"{targets[0]} = {call}"]
    parts = ("".join(f"[{i}]" for i in path) for path in paths)
    return [f"r = {call}", *(f"{to} = r{part}" for to, part in zip(targets, parts, strict=True)), "del r"]


def call_text(
    definition: Definition, op: str, operands: Sequence[str], scalars: Sequence[str], names: dict[str, Any]
) -> tuple[list[str], str]:
    """Return the statements before a call and the text of the call; constants are added to `names`."""
    before: list[str] = []
    tensors, numbers = iter(enumerate(operands)), iter(scalars)

    def text(template: Template) -> str:
        kind = template[0]
        if kind == "tensor":
            at, operand = next(tensors)
            if at in definition.mutated:
                before.append(f"m{at} = {operand}.detach()")
                return f"m{at}"
            return operand
        if kind == "number":
            return next(numbers)
        if kind == "list":
            return "[" + ", ".join(text(each) for each in template[1]) + "]"
        if kind == "device" and len(template) == 1:
            return f"{operands[0]}.device" if operands else "device"
        value = accelerators.device(template[1]) if kind == "device" else template[1]
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{len(names)}"
        names[name] = value
        return name

    given = [text(each) for each in definition.args]
    for name, template in definition.kwargs.items():
        value = text(template)
        given.append(f"**{{{name!r}: {value}}}" if keyword.iskeyword(name) else f"{name}={value}")
    return before, f"{op}({', '.join(given)})"


def compiled(definition: Definition, operator: Any) -> tuple[Run, int]:
    """Return a function that runs the call, and the number of scalars it takes."""
    names: dict[str, Any] = {"op": operator, "device": CPU, "int": int}
    kinds = _scalar_kinds((*definition.args, *definition.kwargs.values()))
    operands = [f"t[a[p+{1 + at}]]" for at in range(definition.operands)]
    scalars = [f"int(s[q+{i}])" if kind == "int" else f"s[q+{i}]" for i, kind in enumerate(kinds)]
    before, call = call_text(definition, "op", operands, scalars, names)
    first = 1 + definition.operands
    after = first + len(definition.results)
    targets = [f"t[a[p+{at}]]" for at in range(first, after)]
    lines = before + _result_lines(call, definition.results, targets)
    lines += [f"t[a[p+{at}]] = m{operand}" for at, operand in enumerate(definition.mutated, after)]
    exec("\n    ".join(["def run(t, a, p, s, q):", *lines]), names)
    run: Run = names["run"]
    return run, len(scalars)


# -- recorded steps ----------------------------------------------------------------------------------


class Program:
    """A compiled recorded step.

    Args:
        session: has the tensors of other spaces.
        tensors: the tensors of the space that runs it.
        calls: the calls of this space.
        checked_calls: definition and operator of the calls that need no check of their results.

    Attributes:
        recipe: its definition.
        run: executes it; takes the arguments of an interned call.
        width: length of its command.
    """

    def __init__(
        self,
        recipe: Recipe,
        session: SessionState,
        tensors: list[Any],
        calls: Mapping[int, tuple[Run, int, int]],
        checked_calls: Mapping[int, tuple[Definition, Any]],
    ) -> None:
        self.recipe = recipe
        self.width = 1 + len(recipe.inputs) + len(recipe.given) + len(recipe.results)
        self._session, self._tensors = session, tensors
        self._calls, self._checked_calls = calls, checked_calls
        self._names: dict[str, Any] = {"device": CPU, "int": int}
        self._tables: dict[int, str] = {}
        lines = ["def run(t, a, p, s, q):"]
        last = {slot: i for i, step in enumerate(recipe.steps) for _, slot in (*step.operands, *step.results)}
        after = [*recipe.results, *(slot for slot, _ in recipe.given), *(slot for slot, _, _ in recipe.kept)]
        last.update(dict.fromkeys(after, len(recipe.steps)))
        places = [(space, f"a[p+{at}]") for at, space in enumerate(recipe.inputs, 1)]
        places += [(space, str(id)) for space, id in recipe.outside]
        for slot, (space, place) in enumerate(places):
            if slot in last:
                lines.append(f"    v{slot} = {self._table(space)}[{place}]")
        # Tensors of the last replay are freed before the steps, as in calls without replay.
        kept = [(space, id) for _, space, id in recipe.kept]
        for space, id in kept:
            if len(session.tensors(space)) <= id:
                session.store(space, id, None)
        stale = [each for each in kept if each not in recipe.outside]
        lines += [f"    {self._table(space)}[{id}] = None" for space, id in (*stale, *recipe.taken)]
        self._first = len(lines) + 1
        dying: list[list[int]] = [[] for _ in range(len(recipe.steps) + 1)]
        for slot, index in last.items():
            dying[index].append(slot)
        for index, step in enumerate(recipe.steps):
            parts = self._step(step)
            if dying[index]:
                parts.append("del " + ", ".join(f"v{slot}" for slot in dying[index]))
            lines.append("    " + "; ".join(parts))
        first = 1 + len(recipe.inputs)
        for at, (slot, space) in enumerate(recipe.given, first):
            lines.append(f"    {self._named(session.store)}({space}, a[p+{at}], v{slot})")
        for at, slot in enumerate(recipe.results, first + len(recipe.given)):
            lines.append(f"    t[a[p+{at}]] = v{slot}")
        lines += [f"    {self._table(space)}[{id}] = v{slot}" for slot, space, id in recipe.kept]
        if len(lines) == 1:
            lines.append("    pass")
        exec(compile("\n".join(lines), "<recorded step>", "exec"), self._names)
        self.run: Run = self._names["run"]

    def failed_step(self, error: BaseException) -> tuple[int, dict[int, Any]]:
        """Return the index of the step that raised `error`, and the slots that the function held then.

        Raises `error` if no step raised it.
        """
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self.run.__code__:
            trace = trace.tb_next
        if trace is None:
            raise error
        held = {int(name[1:]): value for name, value in trace.tb_frame.f_locals.items() if name[0] == "v"}
        return trace.tb_lineno - self._first, held

    def _table(self, space: int) -> str:
        """Return the name of the list of a space's tensors in the text."""
        if space not in self._tables:
            tensors = self._session.tensors(space)
            self._tables[space] = "t" if tensors is self._tensors else self._named(tensors)
        return self._tables[space]

    def _step(self, step: ProgramStep) -> list[str]:
        operands = [f"v{slot}" for _, slot in step.operands]
        results = [f"v{slot}" for _, slot in step.results]
        if step.numbers[0] == SHARE:
            return [f"{results[0]} = {operands[0]}"]
        checked = self._checked_calls.get(step.numbers[0])
        if checked is None:
            return [self._whole(step, operands, results)]
        definition, operator = checked
        op = self._named(operator)
        before, call = call_text(definition, op, operands, self._literals(definition, step), self._names)
        count = len(definition.results)
        parts = before + _result_lines(call, definition.results, results[:count])
        for name, at in zip(results[count:], definition.mutated, strict=True):
            parts.append(f"{name} = m{at}; del m{at}")
        return parts

    def _whole(self, step: ProgramStep, operands: list[str], results: list[str]) -> str:
        """Return the text of a command that is executed as in the log: a checked call, or not a call."""
        numbers, scalars, calls = list(step.numbers), scalars_of(step), self._calls
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
        kinds = _scalar_kinds((*definition.args, *definition.kwargs.values()))
        return [
            self._literal(int(value) if kind == "int" else value)
            for kind, value in zip(kinds, scalars_of(step), strict=True)
        ]

    def _literal(self, value: float) -> str:
        return repr(value) if math.isfinite(value) else self._named(value)

    def _named(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


def scalars_of(step: ProgramStep) -> list[float]:
    """Return the scalars of a command of a program."""
    return array("d", step.scalars).tolist()
