"""The managed parameters and buffers of a module, copies kept equal to them, and broadcasts of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeVar

import torch
from torch import nn

from ...errors import UsageError
from ...group import ProcessGroup
from ..coalesced import CoalescedBroadcast, split_messages

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

    Raises UsageError if the module has no parameter or buffer with a name in the argument ``ignored``.
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

    def buffer_places(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Yield each occurrence of a buffer: its submodule, its name there, and the buffer."""
        chosen = {id(buffer) for _, buffer in self.named_buffers()}
        for owner in self._module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) in chosen:
                    yield owner, name, buffer

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


class Mirror:
    """Keeps ``followers``, lists of copies of ``sources`` with other devices or dtypes, up to date."""

    def __init__(self, sources: Sequence[torch.Tensor], followers: Sequence[Sequence[torch.Tensor]]) -> None:
        self._sources = list(sources)
        self._followers = [list(follower) for follower in followers]
        self._seen: list[object] = []
        self._step = -1

    def refresh(self, step: int) -> None:
        """Update the followers if the sources have changed, or if ``step`` has.

        Changes that autograd knows are written so that a backward pass which needs the old values fails.
        Others (collectives write directly to memory) come with a new ``step``, the number of reduced passes.
        A step may change nothing, so this write is hidden from autograd and backward stays possible.
        """
        seen: list[object] = [
            (tensor._version, tensor.data_ptr(), tensor.requires_grad) for tensor in self._sources
        ]
        if seen == self._seen and step == self._step:
            return
        with torch.no_grad():
            for follower in self._followers:
                into = follower if seen != self._seen else [tensor.data for tensor in follower]
                if into:
                    torch._foreach_copy_(into, self._sources)
                for tensor, source in zip(follower, self._sources, strict=True):
                    if tensor.requires_grad != source.requires_grad:
                        tensor.requires_grad_(source.requires_grad)
        self._seen, self._step = seen, step


class BufferSync:
    """Broadcasts the buffers in ``members``, in few messages."""

    def __init__(self, group: ProcessGroup, members: ModuleTensors) -> None:
        self._group = group
        # Getters instead of tensors, because a module may replace its buffers at any time.
        self._places: list[Callable[[], torch.Tensor | None]] = []
        seen: set[int] = set()
        for owner, name, buffer in members.buffer_places():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                scripted = partial(getattr, owner, name, None)
                self._places.append(scripted if is_scripted(owner) else partial(owner._buffers.get, name))
        self._sent: list[torch.Tensor] = []
        self._broadcasts: list[tuple[CoalescedBroadcast, list[torch.Tensor]]] = []
        self._step = -1

    @property
    def any(self) -> bool:
        """Whether the module has buffers."""
        return bool(self._places)

    def refresh(self, step: int, root: int = 0) -> None:
        """Broadcast the buffers of rank ``root``, once in each ``step``.

        Not more often: autograd may have saved them in the step's first forward pass and refuses later
        writes.
        """
        if step == self._step or not self._places:
            return
        tensors = [buffer for place in self._places if (buffer := place()) is not None]
        if len(tensors) != len(self._sent) or any(
            a is not b for a, b in zip(tensors, self._sent, strict=True)
        ):
            messages = split_messages(tensors, attrgetter("device"))
            self._broadcasts = [(CoalescedBroadcast(self._group, some), some) for some in messages]
            self._sent = tensors
        for broadcast, some in self._broadcasts:
            broadcast.run(some, root)
        self._step = step
