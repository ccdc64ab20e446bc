"""The autograd hooks that notify the reducer of the begin of a pass and of the arrival of gradients.

They hold only weak references to the reducer, because the garbage collector does not see references from
tensors and from autograd's graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ...common.uncompiled import uncompiled
from ..core import Mark, Pass, gradient_hook
from .gradients import Gradients
from .usage import Graph

OutputHook = Callable[[torch.Tensor], None]


class PassListener(Protocol):
    """The interface of the reducer for hooks."""

    def enter(self, graph: Graph) -> None:
        """Called when backward enters ``graph``."""

    def keep_references(self) -> None:
        """Called before a gradient is written into its bucket."""

    def on_gradient(self, index: int, mark: Mark) -> None:
        """The gradient of parameter ``index`` has arrived, and ``mark`` (not ARRIVED) says what follows."""

    def fold_later(self) -> None:
        """Called when a gradient arrives in a copy other than the first, in a pass without reduction."""


def output_hook(reducer: PassListener, graph: Graph) -> OutputHook:
    """Return a hook for an output of a forward pass whose backward pass is reduced."""
    return partial(_enter, weakref.ref(reducer), graph)


@uncompiled
def _enter(owner: weakref.ref[PassListener], graph: Graph, _: torch.Tensor) -> None:
    if (alive := owner()) is not None:
        alive.enter(graph)


def quiet_hook(_: PassListener, graph: Graph) -> OutputHook:
    """Return a hook for any other output, which only keeps ``graph`` alive as long as the output."""
    return partial(_pass_by, graph)


@uncompiled
def _pass_by(graph: Graph, _: torch.Tensor) -> None:
    pass


class Hooks:
    """The hooks on the parameters, which must run last: sent gradients must not change."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles
        self._last_id = RemovableHandle.next_id

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def registered(self, count: int) -> None:
        """Note that the reducer registered ``count`` hooks on other tensors."""
        self._last_id += count

    def come_last(self) -> None:
        """Move behind hooks that were registered on the parameters since the last call."""
        if self._last_id == RemovableHandle.next_id:  # no hook was registered anywhere
            return
        self._last_id = RemovableHandle.next_id
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # autograd ignores move_to_end()


def watch_gradients(
    reducer: PassListener,
    passes: Pass,
    gradients: Gradients,
    copies: Sequence[Sequence[torch.Tensor]],
) -> Hooks:
    """Register hooks that notify ``reducer`` of every gradient of ``copies``, to which autograd writes."""
    lock = threading.Lock()
    put_in_place = _on_only_gradient(reducer, gradients)
    on_several_devices = len({parameter.device for parameter in copies[0]}) > 1

    def hook(index: int, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        if gradients.several:
            return _copy_hook(reducer, passes, index, lock, gradients.is_further(index, parameter))
        only = gradient_hook(
            passes, index, gradients.views, gradients.addresses, index not in gradients.copied, put_in_place
        )
        return _one_at_a_time(lock, only) if on_several_devices else only

    handles = [
        parameter.register_post_accumulate_grad_hook(hook(index, parameter))  # type: ignore[no-untyped-call]
        for copy in copies
        for index, parameter in enumerate(copy)
    ]
    weakref.finalize(reducer, _remove, handles)
    return Hooks(handles)


def _one_at_a_time(
    lock: threading.Lock, hook: Callable[[torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    """Serialise ``hook`` over autograd's threads, one for each device: marked gradients must be in place."""

    @uncompiled
    def gradient_is_ready(parameter: torch.Tensor) -> None:
        with lock:
            hook(parameter)

    return gradient_is_ready


def _on_only_gradient(reducer: PassListener, gradients: Gradients) -> Callable[[int, Mark, bool], None]:
    """The function that the hooks of the only copy call when there is something to do."""
    owner = weakref.ref(reducer)

    @uncompiled
    def arrived(index: int, mark: Mark, taken: bool) -> None:
        if (alive := owner()) is not None:
            if not taken:
                alive.keep_references()
                gradients.take(index)
            if mark is not Mark.ARRIVED:
                alive.on_gradient(index, mark)

    return arrived


def _copy_hook(
    reducer: PassListener, passes: Pass, index: int, lock: threading.Lock, further: bool
) -> Callable[[torch.Tensor], None]:
    """Return a hook for one of several copies (``further``: not the first), which may run in any thread."""
    mark = passes.mark
    owner = weakref.ref(reducer)

    @uncompiled
    def gradient_is_ready(_: torch.Tensor) -> None:
        with lock:
            result = mark(index)
            if result is Mark.ARRIVED or (alive := owner()) is None:
                return
            if result is not Mark.IGNORED:
                alive.on_gradient(index, result)
            elif further:
                alive.fold_later()

    return gradient_is_ready


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
