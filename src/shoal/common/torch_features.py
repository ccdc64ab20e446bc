"""Differences between the supported releases of torch, each in one function.

Features are detected directly instead of by version numbers, so that builds between two releases work too.
No other module of the package detects features of torch; a test checks it.  Functions import torch when they
are called, so that the import of this module is fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsupportedOperation

if TYPE_CHECKING:
    import torch


def premul_factor(op: Any) -> Any:
    """Return the factor of torch's ``_make_nccl_premul_sum``; ``op.factor`` exists from torch 2.13 on."""
    return op.__getstate__()[1]  # (kind, factor) in every release


def enables_reconfigure(options: Any) -> bool:
    """Whether a group is created with ``enable_reconfigure=True``, which exists from torch 2.14 on."""
    return bool(getattr(options, "enable_reconfigure", False))


def is_device_mismatch(error: RuntimeError) -> bool:
    """Whether fake tensors raised ``error`` because the operands of an operator are on two devices.

    From torch 2.13 on the error has a separate class; before, it is only recognizable by its text.
    """
    from torch._subclasses import fake_tensor

    kind: type[RuntimeError] | None = getattr(fake_tensor, "FakeTensorDeviceMismatchError", None)
    if kind is not None:
        return isinstance(error, kind)
    return "found two different devices" in str(error)


def corrected_metadata(operator: Any, results: Any) -> Any:
    """Return ``results`` of an operator on fake tensors, corrected where torch before 2.13 is wrong."""
    import torch

    aten = torch.ops.aten
    if operator is aten._scaled_dot_product_flash_attention_for_cpu.default:
        out, logsumexp = results
        if out.dtype == torch.float64 and logsumexp.dtype != out.dtype:
            return out, logsumexp.double()
    elif operator is aten.mkldnn_rnn_layer_backward.default:
        # Without biases the gradient of the bias had the shape of a weight.
        x, first, second, bias, _, *states = results
        if bias.dim() > 1:
            bias = bias.new_empty(bias.shape[0])
            return x, first, second, bias, bias, *states
    return results


@functools.cache
def writes_to_out(operator: Any) -> bool:
    """Whether an operator is a variant that writes into its argument ``out=``.

    The schema marks such arguments in every release; ``torch.Tag.out`` exists from torch 2.13 on.
    """
    return any(argument.is_out for argument in operator._schema.arguments)


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a sparse COO tensor; ``indices`` (dimensions, entries) within ``shape`` are not checked.

    Until torch 2.12 ``torch.sparse_coo_tensor`` warns that the checks are disabled, even with
    ``check_invariants=False``.
    """
    import torch

    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(indices, values, shape)
    return made


def cuda_runtime_library() -> str | None:
    """Return the file name of torch's CUDA runtime; None: torch is built without CUDA, or for HIP."""
    import torch

    release: str | None = torch.version.cuda
    return release and f"libcudart.so.{release.partition('.')[0]}"


def keep_flight_recorder_off() -> None:
    """Keep torch from attaching its own flight recorder to groups of shoal, from torch 2.15 on.

    Torch's recorder needs a backend in C++ and fails for groups in Python; shoal has :mod:`shoal.recorder`.
    """
    import torch.distributed as dist

    attach = getattr(dist.distributed_c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return

    @functools.wraps(attach)
    def attach_to_others(group: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(type(group), "__shoal_group__"):
            attach(group, *args, **kwargs)

    vars(dist.distributed_c10d)["_maybe_attach_flight_recorder"] = attach_to_others


#: name of a group's method from torch 2.13 on -> its name until torch 2.12
_OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def group_method(group: Any, name: str) -> Any:
    """Return a method of one of torch's own process groups, under its name in any release."""
    return getattr(group, name if hasattr(group, name) else _OLDER_NAMES.get(name, name))


class HookTypes(NamedTuple):
    """Types of the arguments of hooks around operations."""

    operation: Callable[[str], Any]  #: returns the member of ``HookOpName`` for a name of torch 2.15
    before: Callable[[], Any]  #: ``PreHookArgs``
    after: Callable[[], Any]  #: ``PostHookArgs``


@functools.cache
def hook_types() -> HookTypes:
    """Return the types of hooks around operations; raise UnsupportedOperation before torch 2.14."""
    import torch
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    names = getattr(c10d, "HookOpName", None)
    if names is None:
        raise UnsupportedOperation(
            f"hooks around operations need torch 2.14 or later; torch {torch.__version__} is installed"
        )

    @functools.cache
    def operation(name: str) -> Any:
        # From torch 2.15 on each form of an operation has a name; in torch 2.14 all forms share one.
        family = name
        for form in ("_INTO_TENSOR_COALESCED", "_TENSOR_COALESCED", "_COALESCED", "_BASE"):
            family = family.removesuffix(form)
        return getattr(names, name, None) or getattr(names, family)

    return HookTypes(operation, c10d.PreHookArgs, c10d.PostHookArgs)


def attach_hooks_to_groups() -> None:
    """Make ``NanCheckHook.attach`` and ``FlightRecorderHook.attach`` (torch >= 2.14) support shoal's groups.

    Both register hooks in C++, which operations of groups in Python do not call.  For groups of shoal they
    call the method ``_attach_nan_check`` or ``_attach_flight_recorder`` instead.
    """
    from torch._C import _distributed_c10d

    for name, method in (
        ("NanCheckHook", "_attach_nan_check"),
        ("FlightRecorderHook", "_attach_flight_recorder"),
    ):
        if (hook := getattr(_distributed_c10d, name, None)) is not None:
            hook.attach = staticmethod(_attaching(hook.attach, method))


def _attaching(attach: Callable[..., Any], method: str) -> Callable[..., Any]:
    @functools.wraps(attach)
    def attach_any(pg: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(type(pg), "__shoal_group__"):
            return getattr(pg, method)(*args, **kwargs)
        return attach(pg, *args, **kwargs)

    return attach_any
