"""Backends by the names that torch's scripts use.

``"gloo"``, torch's name for what moves CPU tensors, means shoal's native engine, as does no name at all.
``"tcp"``, which was torch's first name for that, means the native engine over TCP alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backend.registry import NATIVE, backend_names
from ..errors import UnsupportedOperation, UsageError
from ..torch_terms import BACKEND
from .state import GroupLike, default_group, is_absent, state

#: Torch's backends that shoal has no engine for, and the hardware or library of each.
_ABSENT = {
    "nccl": "NVIDIA's GPUs",
    "mpi": "an MPI library",
    "ucc": "the UCC library",
    "xccl": "Intel's GPUs",
    "fake": "no communication at all",
}


class BackendName(str):
    """The name of a backend in lower case, with torch's constants for comparisons."""

    __slots__ = ()

    SHOAL = BACKEND
    GLOO = "gloo"
    TCP = "tcp"
    NCCL = "nccl"
    MPI = "mpi"
    UCC = "ucc"
    XCCL = "xccl"

    def __new__(cls, name: str) -> BackendName:
        if not isinstance(name, str):
            raise UsageError(f"Backend takes the name of a backend, got {type(name).__name__}")
        return super().__new__(cls, name.lower())


#: The names by which scripts ask for the native engine.
_NATIVE_NAMES = (BackendName.SHOAL, BackendName.GLOO, BackendName.TCP)


@dataclass(frozen=True)
class BackendEngine:
    """The engine that the name of a backend stands for.

    Attributes:
        name: that the user is told.
        backend: the argument of :func:`shoal.init`.
        transport: the argument of :func:`shoal.init`; None: what ``SHOAL_TRANSPORT`` says.
    """

    name: str
    backend: str
    transport: str | None = None


def parse_backend(backend: str | None) -> BackendEngine:
    """The engine that the argument ``backend`` of ``init_process_group`` asks for.

    Args:
        backend: a name, or ``"cpu:name"``; None means ``"shoal"``.

    Raises:
        UnsupportedOperation: an engine of torch that has no counterpart here, or another device than the CPU.
        UsageError: nobody registered such a backend.
    """
    if backend is None:
        return BackendEngine(BackendName.SHOAL, NATIVE)
    if not isinstance(backend, str):
        raise UsageError(f"backend={backend!r}: expected a str")
    parts = [part.strip() for part in backend.lower().split(",")]
    names = dict(_device_and_name(part) for part in parts)
    others = [device for device in names if device != "cpu"]
    if others or len(names) != len(parts):
        raise UnsupportedOperation(
            f"backend={backend!r}: shoal moves CPU tensors, so a device other than cpu has no backend here; "
            'say "gloo", "cpu:gloo" or nothing'
        )
    name = names["cpu"]
    if name in backend_names():
        return BackendEngine(name, name)
    if name in _NATIVE_NAMES:
        return BackendEngine(name, NATIVE, "tcp" if name == BackendName.TCP else None)
    if name in _ABSENT:
        raise UnsupportedOperation(
            f"backend={backend!r}: shoal has no such engine, it is for {_ABSENT[name]}; shoal moves CPU "
            'tensors, for which "gloo" or nothing names the native engine'
        )
    known = ", ".join(sorted({*_NATIVE_NAMES, *backend_names()}))
    raise UsageError(f"backend={backend!r} is unknown; known are {known}")


def _device_and_name(part: str) -> tuple[str, str]:
    device, _, name = part.rpartition(":")
    return device or "cpu", name


def refuse_device(operation: str, device: torch.device | int | None) -> None:
    """Refuse a ``device_id`` that is not the CPU.

    Raises:
        UnsupportedOperation: it is a GPU.
    """
    if device is not None and (isinstance(device, int) or torch.device(device).type != "cpu"):
        raise UnsupportedOperation(
            f"{operation}: device_id={device!r}: shoal moves CPU tensors; leave it out"
        )


def get_backend(group: GroupLike = None) -> str:
    """The name of the backend, as it was given to :func:`init_process_group`; ``"shoal"`` if none was."""
    world = default_group("get_backend")
    if is_absent(group):
        raise UsageError(f"get_backend on rank {world.rank}: this rank is not in the given group")
    return BackendName(state.backend)


def get_backend_config(group: GroupLike = None) -> str:
    """Devices and their backends, such as ``"cpu:gloo"``."""
    return f"cpu:{get_backend(group)}"


def get_default_backend_for_device(device: str | torch.device) -> str:
    """``"shoal"`` for the CPU.

    Raises:
        UnsupportedOperation: for any other device.
    """
    refuse_device("get_default_backend_for_device", torch.device(device))
    return BackendName.SHOAL


def is_backend_available(backend: str) -> bool:
    """Whether :func:`init_process_group` takes this name."""
    try:
        parse_backend(backend)
    except UsageError:
        return False
    return True


def is_gloo_available() -> bool:
    """True: the name ``"gloo"`` means the native engine here."""
    return True


def is_nccl_available() -> bool:
    """False: shoal moves CPU tensors."""
    return False


def is_mpi_available() -> bool:
    """False: shoal does not run over an MPI library."""
    return False


def is_ucc_available() -> bool:
    """False: shoal does not run over UCC."""
    return False


def is_xccl_available() -> bool:
    """False: shoal moves CPU tensors."""
    return False
