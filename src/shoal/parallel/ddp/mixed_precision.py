"""Mixed precision: forward, backward and reduction in a lower precision than that of the parameters.

Every parameter has a counterpart in lower precision, which replaces it in the module during forward, and
during backward because activation checkpointing runs parts of forward there.  Autograd writes gradients to
the counterparts; the reducer writes their averages to the gradients of the parameters, in full precision.  So
code between the passes (an optimiser, ``state_dict``, ``clip_grad_norm_``) gets full precision only.

The choice of tensors to cast follows torch's DistributedDataParallel (``_MixedPrecision``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ...common.containers import map_leaves
from ...common.copy_refusal import refuses_copies
from ...common.never_compile import never_compile
from ...errors import UsageError
from ..reducer.reducer import outputs_with_graph
from .copies import is_packed
from .module_tensors import Mirror, ModuleTensors, refuse_scripted


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """The dtypes in which :class:`DistributedDataParallel` runs forward, backward and the reduction.

    Only floating-point tensors are cast.  None keeps the dtype.

    Attributes:
        param_dtype: the dtype of parameters in forward and backward, and so of outputs.
        reduce_dtype: the dtype in which gradients are averaged; default: ``param_dtype``.
        buffer_dtype: the dtype of buffers in forward.
        cast_forward_inputs: cast the inputs of forward to ``param_dtype``.

    Raises:
        UsageError: a dtype is not a floating-point dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise UsageError(
                    f"{name} must be a floating-point dtype, such as torch.bfloat16, got {value!r}"
                )

    @property
    def casts(self) -> bool:
        """Whether forward uses other tensors than those of the module."""
        return self.param_dtype is not None or self.buffer_dtype is not None


class LowPrecision:
    """The counterparts of a module's parameters, and their exchange for the parameters.

    Attributes:
        in_backward: whether a backward pass through an output of the module is running.

    Raises UsageError if ``named_parameters()`` lacks a trained parameter, or ``torch.jit`` made a part.
    """

    def __init__(self, module: nn.Module, precision: MixedPrecision, members: ModuleTensors) -> None:
        self._module = module
        self._members = members
        refuse_scripted(module, "mixed_precision")
        self._precision = precision
        listed = {id(parameter) for parameter in module.parameters()}
        ignored = listed - {id(parameter) for _, parameter in members.named_parameters()}
        self._counterparts: dict[int, nn.Parameter] = {}
        #: For each occurrence of a parameter: its dictionary, its name there, itself, its counterpart.
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        masters: list[torch.Tensor] = []
        for owner in module.modules():
            for name, master in owner._parameters.items():
                if master is None or id(master) in ignored:
                    continue
                if master.requires_grad and id(master) not in listed:
                    raise UsageError(
                        f"the parameter {name!r} of {type(owner).__name__} requires a gradient, but "
                        "is not in named_parameters() of the module: mixed_precision cannot train it"
                    )
                if id(master) not in self._counterparts:
                    dtype = precision.param_dtype if master.is_floating_point() else None
                    low = nn.Parameter(master.detach().to(dtype, copy=True), master.requires_grad)
                    self._counterparts[id(master)] = low
                    masters.append(master)
                self._places.append((owner._parameters, name, master, self._counterparts[id(master)]))
        self._mirror = Mirror(masters, [list(self._counterparts.values())])
        self._depth = 0
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]] = []
        self.in_backward = False

    def counterparts(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that forward uses instead of ``parameters``."""
        return [self._counterparts[id(parameter)] for parameter in parameters]

    def refresh(self, step: int) -> None:
        """Update the counterparts; ``step`` is the number of reduced passes so far."""
        self._mirror.refresh(step)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return ``inputs`` in the precision of the counterparts."""
        dtype = self._precision.param_dtype
        if dtype is None or not self._precision.cast_forward_inputs:
            return inputs

        def cast(leaf: Any) -> Any:
            tensor = leaf.data if isinstance(leaf, PackedSequence) else leaf
            is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            return leaf.to(dtype) if is_float else leaf

        return map_leaves(cast, inputs, is_packed)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass with the counterparts in place."""
        self._swap_in()
        try:
            return self._module(*args, **kwargs)
        finally:
            self._swap_out()

    def hook_outputs(self, output: Any) -> None:
        """Put the counterparts in place during backward passes through ``output``."""
        hook = partial(_backward_begins, weakref.ref(self))
        for tensor in outputs_with_graph(output):
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    # -- exchanging ------------------------------------------------------------------------------

    def _swap_in(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for places, name, _, low in self._places:
            places[name] = low
        if (dtype := self._precision.buffer_dtype) is None:
            return
        cast: dict[int, torch.Tensor] = {}
        for owner, name, full in list(self._members.buffer_places()):
            if full.is_floating_point() and full.dtype != dtype:
                owner._buffers[name] = cast.setdefault(id(full), full.to(dtype))
                self._buffers.append((owner._buffers, name, full, cast[id(full)]))

    def _swap_out(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        for places, name, master, _ in self._places:
            places[name] = master
        buffers, self._buffers = self._buffers, []
        with torch.no_grad():
            for where, name, full, low in buffers:
                now = where.get(name)
                if now is not low:  # the module replaced its buffer
                    where[name] = None if now is None else now.to(full.dtype)
                    continue
                where[name] = full
                # Elements that forward did not write keep their full precision.  torch.equal would make the
                # host wait for the device.
                full.copy_(torch.where(full.to(low.dtype) == low, full, low.to(full.dtype)))


@never_compile
def _backward_begins(owner: weakref.ref[LowPrecision], _: torch.Tensor) -> None:
    if (alive := owner()) is not None and not alive.in_backward:
        alive.in_backward = True
        alive._swap_in()
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(alive))


@refuses_copies("a callback of backward", "gradients", "Copy the model outside of backward")
@never_compile
class _EndOfBackward:
    """Puts the parameters back in place at the end of a backward pass.

    Autograd calls it or, if an exception ends the pass, deletes it without a call; both end the pass.
    """

    def __init__(self, precision: LowPrecision) -> None:
        self._precision: LowPrecision | None = precision

    def __call__(self) -> None:
        precision, self._precision = self._precision, None
        if precision is not None:
            precision.in_backward = False
            precision._swap_out()

    __del__ = __call__
