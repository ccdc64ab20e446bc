"""Operations whose result metadata only the node can determine: it runs them and replies with it."""

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
    """Run an operator, which may change the shape of its ``out=`` operands.

    Args:
        others: returns all tensors of the node.

    Returns:
        tensors: detached aliases of the operands that it wrote to (the operands keep their metadata), then
            the results.
        answer: the result with ``("tensor", metadata)`` or ``("written", index)`` for each tensor; if it
            writes to tensors, a list of this and their metadata.

    Raises:
        Exception: raised by the operator.
        UnsupportedOperation: a result is not a dense tensor.
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

    places = written_by(operator) or frozenset()  # an unknown operator raises when it is called
    args = [given(each) if i in places else each for i, each in enumerate(args)]
    kwargs = {name: given(each) if name in places else each for name, each in kwargs.items()}
    count = len(tensors)
    result = tell(run(*args, **kwargs))
    if not places:
        return tensors, result
    return tensors, ("list", [result, *(("tensor", told(each)) for each in tensors[:count])])
