"""An interned call as a function over the list of a space's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import accelerators
from .commands import Definition, Template

#: function of the tensors, the numbers, the position in them, the scalars, and the position in those
Run = Callable[[list[Any], Any, int, Any, int], None]


def compiled(definition: Definition, operator: Any, device: torch.device) -> tuple[Run, int]:
    """A function that runs the call, and how many scalars it takes."""
    names: dict[str, Any] = {"op": operator, "device": device, "int": int}
    operand = scalar = 0
    before: list[str] = []

    def text(template: Template) -> str:
        nonlocal operand, scalar
        kind = template[0]
        if kind == "tensor":
            at, operand = operand, operand + 1
            if at in definition.mutated:
                before.append(f"    m{at} = t[a[p+{at + 1}]].detach()")
                return f"m{at}"
            return f"t[a[p+{at + 1}]]"
        if kind == "number":
            at, scalar = scalar, scalar + 1
            return f"int(s[q+{at}])" if template[1] == "int" else f"s[q+{at}]"
        if kind == "list":
            return "[" + ", ".join(text(each) for each in template[1]) + "]"
        if kind == "device" and len(template) == 1:
            return "t[a[p+1]].device" if definition.operands else "device"
        name = f"c{len(names)}"
        names[name] = accelerators.device(template[1]) if kind == "device" else template[1]
        return name

    given = [text(each) for each in definition.args]
    keyed = [f"{name!r}: {text(each)}" for name, each in definition.kwargs.items()]
    call = f"op({', '.join(given)}{', **{' + ', '.join(keyed) + '}' if keyed else ''})"
    first = 1 + definition.operands
    lines = ["def run(t, a, p, s, q):", *before]
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
    return run, scalar
