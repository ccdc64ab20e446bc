"""Operations whose results only the node can tell: it runs them at once, and tells of what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..protocol.metadata import told
from ..protocol.operators import function, written_by
from .growing import let_grow


def run_asked(
    operator: str, args: list[Any], kwargs: dict[str, Any], others: Callable[[], list[Any]]
) -> tuple[list[torch.Tensor], Any]:
    """Run an operator, which may give its operands of ``out=`` another shape.

    Args:
        others: gives all tensors of the node.

    Returns:
        tensors: those that it wrote to, of which the operands themselves are left as they were, and what it
            gives.
        answer: its result with ``("tensor", metadata)`` in the place of a tensor, or ``("written", index)``;
            if it writes to tensors, a list of that and of their metadata.

    Raises:
        Exception: what the operator raises.
        UnsupportedOperation: a result is no dense tensor.
    """
    run = function(operator)
    tensors: list[torch.Tensor] = []

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(each) for each in value]
        if isinstance(value, torch.Tensor):
            let_grow(value, others())
            tensors.append(value.detach())
            return tensors[-1]
        return value

    def tell(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for i in range(count):
                if tensors[i] is value:
                    return ("written", i)
            tensors.append(value)
            return ("tensor", told(value))
        if isinstance(value, (tuple, list)):
            return ("list", [tell(each) for each in value])
        return ("constant", value)

    places = written_by(operator) or frozenset()  # an unknown one says so when it is called
    args = [given(each) if i in places else each for i, each in enumerate(args)]
    kwargs = {name: given(each) if name in places else each for name, each in kwargs.items()}
    count = len(tensors)
    result = tell(run(*args, **kwargs))
    if not places:
        return tensors, result
    return tensors, ("list", [result, *(("tensor", told(each)) for each in tensors[:count])])
