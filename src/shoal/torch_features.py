"""Differences between the supported releases of torch, each in one function.

Every difference is found by looking for the feature and not by comparing version numbers, so that builds
between two releases work too.  Nothing else in the package asks torch what it has; a test forbids it.
A function imports what it needs of torch, so that importing this module costs nothing.
"""

from __future__ import annotations

import functools
from typing import Any


def premul_factor(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM of torch; ``op.factor`` exists from torch 2.13 on.

    Args:
        op: the result of ``torch.distributed._make_nccl_premul_sum``.
    """
    return op.__getstate__()[1]  # (kind, factor) in every release


@functools.cache
def fake_device_mismatch() -> type[Exception]:
    """Return the error class of fake tensors for operands on two devices.

    It exists from torch 2.13 on.  Earlier releases raise a plain RuntimeError; the class that is returned for
    them is never raised.
    """
    from torch._subclasses import fake_tensor

    found: type[Exception] | None = getattr(fake_tensor, "FakeTensorDeviceMismatchError", None)
    return found or type("FakeTensorDeviceMismatchError", (RuntimeError,), {})


@functools.cache
def writes_to_out(operator: Any) -> bool:
    """Whether an operator is a variant that writes into its argument ``out=``.

    Its schema says so in every release; ``torch.Tag.out`` exists from torch 2.13 on.
    """
    return any(argument.is_out for argument in operator._schema.arguments)


def keep_flight_recorder_off() -> None:
    """Keep torch from attaching its own flight recorder to groups of shoal, from torch 2.15 on.

    Torch records through a backend in C++, which a group in Python has not, and fails where there is none.
    shoal has :mod:`shoal.recorder`.
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
