"""Compilation of an interned call to a function over the list of a space's tensors."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..protocol.commands import Definition, Template
from . import accelerators

#: (tensors, numbers, position in the numbers, scalars, position in the scalars)
Run = Callable[[list[Any], Any, int, Any, int], None]


def kinds_of(template: Template) -> list[str]:
    """Return the kinds, "float" or "int", of the scalars that a template takes."""
    if template[0] == "list":
        return [kind for each in template[1] for kind in kinds_of(each)]
    return [template[1]] if template[0] == "number" else []


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


def compiled(definition: Definition, operator: Any, device: torch.device) -> tuple[Run, int]:
    """Return a function that runs the call, and the number of scalars it takes."""
    names: dict[str, Any] = {"op": operator, "device": device, "int": int}
    kinds = [kind for each in (*definition.args, *definition.kwargs.values()) for kind in kinds_of(each)]
    operands = [f"t[a[p+{1 + at}]]" for at in range(definition.operands)]
    scalars = [f"int(s[q+{i}])" if kind == "int" else f"s[q+{i}]" for i, kind in enumerate(kinds)]
    before, call = call_text(definition, "op", operands, scalars, names)
    first = 1 + definition.operands
    lines = ["def run(t, a, p, s, q):", *(f"    {each}" for each in before)]
    if definition.results == [()]:
        lines.append(f"    t[a[p+{first}]] = {call}")
    else:
        lines.append(f"    r = {call}")
        for slot, path in enumerate(definition.results):
            lines.append(f"    t[a[p+{first + slot}]] = r{''.join(f'[{i}]' for i in path)}")
    after = first + len(definition.results)
    for slot, at in enumerate(definition.mutated):
        lines.append(f"    t[a[p+{after + slot}]] = m{at}")
    exec("\n".join(lines), names)
    run: Run = names["run"]
    return run, len(scalars)
