"""The parameters and buffers of a module that the wrapper manages: all except ignored ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from ...errors import UsageError

T = TypeVar("T", bound=torch.Tensor)


def is_scripted(module: nn.Module) -> bool:
    """Whether ``torch.jit`` made ``module``, which then keeps parameters, buffers and submodules in C++."""
    return isinstance(module, torch.jit.ScriptModule)


def refuse_scripted(module: nn.Module, option: str) -> None:
    """Raise UsageError if ``torch.jit`` made a part of ``module``; ``option`` needs modules in Python."""
    for name, owner in module.named_modules():
        if is_scripted(owner):
            raise UsageError(
                f"{option} needs modules in Python, but torch.jit made "
                + (f"the part {name!r} of the model" if name else "the model")
                + f": omit {option}, or pass the original of the model, before torch.jit.script"
            )


class ModuleTensors:
    """The parameters and buffers that the wrapper of ``module`` manages.

    Args:
        ignored: names of parameters and buffers to ignore.  Those in the module's attribute
            ``_ddp_params_and_buffers_to_ignore``, which torch's
            ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` sets, are added.

    Attributes:
        ignored: the names from both.

    Raises:
        UsageError: the module has no parameter or buffer with a name in the argument ``ignored``.
    """

    def __init__(self, module: nn.Module, ignored: Iterable[str] = ()) -> None:
        self._module = module
        chosen = {ignored} if isinstance(ignored, str) else set(ignored)
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        if unknown := sorted(map(repr, chosen - known)):
            raise UsageError(
                f"params_and_buffers_to_ignore names {', '.join(unknown)}, which {type(module).__name__} "
                "does not have; names are those of module.named_parameters() and module.named_buffers()"
            )
        # Torch's function needs a dot before the names of the outermost module.
        others = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.ignored = frozenset(chosen | {str(name).removeprefix(".") for name in others})

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return each parameter once, with its name."""
        return list(_once(self._module.named_parameters(remove_duplicate=False), self.ignored))

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return each current buffer of the module once, with its name."""
        return list(_once(self._module.named_buffers(remove_duplicate=False), self.ignored))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that require a gradient, with their names."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def tensors(self) -> list[torch.Tensor]:
        """Return all parameters and buffers."""
        return [tensor for _, tensor in (*self.named_parameters(), *self.named_buffers())]


def _once(named: Iterable[tuple[str, T]], ignored: frozenset[str]) -> Iterator[tuple[str, T]]:
    seen: set[int] = set()
    for name, tensor in named:
        if name not in ignored and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def sparse_dims(module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> dict[int, int]:
    """Return the indices of parameters with sparse gradients, with their numbers of sparse dimensions."""
    tables = {id(owner.weight) for owner in module.modules() if _is_embedding(owner) and owner.sparse}
    return {index: 1 for index, (_, parameter) in enumerate(named) if id(parameter) in tables}


def _is_embedding(module: nn.Module) -> bool:
    if is_scripted(module):
        return getattr(module, "original_name", "") in ("Embedding", "EmbeddingBag")
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def delayed_parameters(
    named: Sequence[tuple[str, nn.Parameter]],
    chosen: Sequence[tuple[str, nn.Parameter]],
    after: nn.Parameter | None,
) -> tuple[tuple[int, ...], int | None]:
    """Return the indices of the parameters to reduce late, and the index of the one that they wait for.

    Raises UsageError if one of them is not trained, or the arguments contradict each other.
    """
    if not chosen and after is None:
        return (), None
    index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
    if not chosen or after is None or id(after) not in index_of:
        raise UsageError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce belong together: the second must be "
            "a parameter of the module that requires a gradient"
        )
    unknown = [name for name, parameter in chosen if id(parameter) not in index_of]
    if unknown:
        raise UsageError(f"delay_all_reduce_named_params names {unknown}, which the module does not train")
    delayed = tuple(sorted({index_of[id(parameter)] for _, parameter in chosen}))
    if index_of[id(after)] in delayed:
        raise UsageError("param_to_hook_all_reduce must not be among delay_all_reduce_named_params")
    return delayed, index_of[id(after)]
