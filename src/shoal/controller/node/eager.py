"""Operations whose result metadata only the node can determine: it runs them and replies with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..protocol.metadata import wire_metadata
from ..protocol.operators import function, written_arguments_of

#: operators that enlarge tensors, in addition to those with ``out=``
RESIZING = frozenset({"aten::resize_", "aten::resize_as_"})


def make_resizable(tensor: torch.Tensor, others: Iterable[Any]) -> None:
    """Move a tensor to memory that torch can enlarge; torch cannot enlarge memory of messages or arrays.

    The tensors in `others` that share its memory are moved too and still share it.
    """
    storage = tensor.untyped_storage()
    if storage.resizable():
        return
    moved = storage.clone()  # type: ignore[no-untyped-call]
    sharing = {
        id(each): each
        for each in (tensor, *others)
        if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata == storage._cdata
    }
    for each in sharing.values():
        each.set_(moved, each.storage_offset(), each.shape, each.stride())


def run_with_metadata(
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
    tensors: list[torch.Tensor] = []

    def alias(value: Any) -> Any:
        if isinstance(value, list):
            return [alias(each) for each in value]
        if isinstance(value, torch.Tensor):
            make_resizable(value, others())
            tensors.append(value.detach())
            return tensors[-1]
        return value

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for i in range(count):
                if tensors[i] is value:
                    return ("written", i)
            tensors.append(value)
            return ("tensor", wire_metadata(value))
        if isinstance(value, (tuple, list)):
            return ("list", [describe(each) for each in value])
        return ("constant", value)

    places = written_arguments_of(operator)  # an unknown operator raises when it is called
    args = [alias(each) if i in places else each for i, each in enumerate(args)]
    kwargs = {name: alias(each) if name in places else each for name, each in kwargs.items()}
    count = len(tensors)
    result = describe(function(operator)(*args, **kwargs))
    if not places:
        return tensors, result
    return tensors, ("list", [result, *(("tensor", wire_metadata(each)) for each in tensors[:count])])
