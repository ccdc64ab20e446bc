"""Checks that all ranks have the same model, and that it does not change after it was wrapped.

Without them, ranks with different models could average gradients of different parameters without an error,
since the sizes of messages may be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from typing import NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...errors import ModelMismatch, UsageError
from ...group import ProcessGroup
from ..coalesced import broadcast_obstacle
from ..consistency import check_same, describe_parameter, describe_tensor
from ..core import values_are
from ..join import Joinable
from .module_tensors import ModuleTensors, is_scripted

_dtype = attrgetter("dtype")

#: Maximum number of tensors named in one error.
_MAX_NAMES_SHOWN = 10


def check_same_model(
    group: ProcessGroup,
    members: ModuleTensors,
    settings: Mapping[str, object],
    problem: UsageError | None = None,
) -> None:
    """Raise on every rank unless all ranks have equal models.  Collective.

    Compares the names, kinds, shapes, strides, dtypes and ``requires_grad`` of all parameters and buffers,
    their order, and ``settings``, but not the values.

    Args:
        problem: the reason why this rank cannot wrap its model.

    Raises:
        ModelMismatch: models differ; the message lists the differences of each rank from rank 0.
        UsageError: ``problem``, on the ranks that have one.
    """
    fitness = "valid" if problem is None else f"invalid ({problem})"
    items = [("the model", fitness), *_describe(members, settings)]
    try:
        check_same(group, "wrapped models that differ", items)
    except ModelMismatch:
        if problem is None:
            raise
    if problem is not None:
        raise problem


def check_can_be_sent(group: ProcessGroup, members: ModuleTensors) -> None:
    """Raise UsageError, with reasons, unless all parameters and buffers can be sent and overwritten."""
    device_obstacle = cache(partial(_device_obstacle, group))
    lines = []
    named: list[tuple[str, torch.Tensor]] = []
    named += [(f"parameter {name!r}", tensor) for name, tensor in members.named_parameters()]
    named += [(f"buffer {name!r}", tensor) for name, tensor in members.named_buffers()]
    for name, tensor in named:
        if reason := broadcast_obstacle(tensor) or device_obstacle(tensor.device):
            lines.append(f"  {name}: {reason}")
    if lines:
        more = [f"  and {len(lines) - _MAX_NAMES_SHOWN} more"] if len(lines) > _MAX_NAMES_SHOWN else []
        raise UsageError(
            f"DistributedDataParallel cannot send these tensors of the module on rank {group.rank} to other "
            "ranks:\n"
            + "\n".join(lines[:_MAX_NAMES_SHOWN] + more)
            + "\nMake them dense tensors that have values, or "
            "pass their names in params_and_buffers_to_ignore=[...], which keeps them local to each rank"
        )


def _device_obstacle(group: ProcessGroup, device: torch.device) -> str | None:
    try:
        group.empty(0, dtype=torch.uint8, device=device)
    except UsageError as error:
        return f"it is on {device.type}: {error}"
    return None


class ModelChangeDetector:
    """Detects changes of a model after it was wrapped.

    Each rank would train a replaced, added or unfrozen parameter separately, without an error.
    """

    def __init__(self, module: nn.Module, members: ModuleTensors, rank: int) -> None:
        self._module = module
        self._ignored = members.ignored
        self._rank = rank
        plain = [owner for owner in module.modules() if not is_scripted(owner)]
        self._tables = [owner._parameters for owner in plain]
        self._tables += [owner._modules for owner in plain]  # type: ignore[misc]
        # TorchScript keeps the members of its modules in C++; parameters can be replaced but not added.
        self._scripted = [owner for owner in module.modules() if is_scripted(owner)]
        self._in_scripts = self._ids_in_scripts()
        self._entries = self._now()
        self._parameters = [parameter for _, parameter in members.named_parameters()]
        self._dtypes = list(map(_dtype, self._parameters))
        self._frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._registered = self._named()

    def check(self) -> None:
        """Raise UsageError, naming the parameter, if the model was changed.  Called in every forward pass."""
        if (
            not values_are(self._tables, self._entries)
            or list(map(_dtype, self._parameters)) != self._dtypes
            or any(parameter.requires_grad for parameter in self._frozen)
            or (self._scripted and self._ids_in_scripts() != self._in_scripts)
        ):
            self._raise_if_parameter_changed()
            self._entries, self._in_scripts = self._now(), self._ids_in_scripts()

    def _now(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def _ids_in_scripts(self) -> list[int]:
        return [id(parameter) for owner in self._scripted for parameter in owner._parameters.values()]

    def _named(self) -> dict[str, nn.Parameter]:
        named = self._module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in named if name not in self._ignored}

    def _raise_if_parameter_changed(self) -> None:
        """Raise an error that names the changed parameter; return if no parameter changed."""
        registered = self._named()
        for name, parameter in self._registered.items():
            if name not in registered:
                self._raise_changed(name, "was removed from the module")
            if registered[name] is not parameter:
                self._raise_changed(name, "was replaced")
        for name in registered:
            if name not in self._registered:
                self._raise_changed(name, "was added")
        for parameter, dtype in zip(self._parameters, self._dtypes, strict=True):
            if parameter.dtype != dtype:
                what = f"was {dtype} when it was wrapped and is {parameter.dtype} now"
                self._raise_changed(self._names[id(parameter)], what)
        for parameter in self._frozen:
            if parameter.requires_grad:
                what = "was frozen when it was wrapped and requires a gradient now"
                self._raise_changed(self._names[id(parameter)], what)

    def _raise_changed(self, name: str, what: str) -> NoReturn:
        raise UsageError(
            f"the model on rank {self._rank} changed after it was wrapped in DistributedDataParallel: "
            f"parameter {name!r} {what}; wrap the module again after such a change"
        )


def _describe(members: ModuleTensors, settings: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the properties of a model that must be equal on all ranks, by name."""
    items = [
        (f"parameter {name!r}", describe_parameter(parameter))
        for name, parameter in members.named_parameters()
    ]
    items += [(f"buffer {name!r}", describe_tensor(buffer)) for name, buffer in members.named_buffers()]
    items += [(f"option {name}", _option_text(value)) for name, value in settings.items()]
    return items


def _option_text(value: object) -> str:
    """Return the text of an option, which is the same for ranks in C++."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:.15g}" if is_number else repr(value)


def check_trainable(module: nn.Module, members: ModuleTensors) -> None:
    """Raise UsageError if no parameter requires a gradient, one has no shape, or a part is wrapped."""
    for name, inner in module.named_modules():
        if isinstance(inner, Joinable):
            raise UsageError(
                f"the module holds a {type(inner).__name__} already"
                + (f", {name!r}" if name else "")
                + ": two wrappers would reduce the same gradients; wrap each parameter once"
            )
    for name, parameter in members.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet; run a forward pass through the module before wrapping"
            )
    if not members.trained():
        raise UsageError(
            f"no parameter of {type(module).__name__} requires a gradient: there is nothing to train; use "
            "the module without a wrapper"
        )
