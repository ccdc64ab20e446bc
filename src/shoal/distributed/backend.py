"""Torch's backend names and the engines they select.

``"gloo"``, torch's CPU backend, selects shoal's native engine, and ``"tcp"``, torch's first name for that
backend, the native engine over TCP only.  None and ``"shoal"`` select the backend of ``SHOAL_BACKEND``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ..backend.registry import NATIVE, backend_names, default_backend
from ..errors import UnsupportedOperation, UsageError
from ..torch_terms import BACKEND
from .state import GroupLike, default_group, is_non_member, state

#: Torch's backends without a counterpart in shoal -> the hardware or library that each needs.
_UNSUPPORTED = {
    "nccl": "NVIDIA's GPUs",
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


#: Names of torch that select the native engine.
_NATIVE_NAMES = (BackendName.GLOO, BackendName.TCP)


@dataclass(frozen=True)
class BackendEngine:
    """The engine that a backend name selects."""

    name: str  # the name shown to the user
    backend: str  # the argument of :func:`shoal.init`
    transport: str | None = None  # the argument of :func:`shoal.init`; None: ``SHOAL_TRANSPORT``


def parse_backend(backend: str | None) -> BackendEngine:
    """Return the engine that the argument ``backend`` of ``init_process_group`` selects.

    Args:
        backend: a name, or ``"cpu:name"``; None means ``"shoal"``, the backend of ``SHOAL_BACKEND``.

    Raises:
        UnsupportedOperation: a backend of torch without a counterpart here, or a device other than the CPU.
        UsageError: no backend is registered under that name.
    """
    if backend is None:
        backend = BackendName.SHOAL
    if not isinstance(backend, str):
        raise UsageError(f"backend={backend!r}: expected a str")
    parts = [part.strip() for part in backend.lower().split(",")]
    names = dict(_device_and_name(part) for part in parts)
    others = [device for device in names if device != "cpu"]
    if others or len(names) != len(parts):
        raise UnsupportedOperation(
            f"backend={backend!r}: shoal communicates CPU tensors and has no backend for other devices; "
            'use "gloo", "cpu:gloo" or None'
        )
    name = names["cpu"]
    if name in backend_names():
        return BackendEngine(name, name)
    if name == BackendName.SHOAL:
        return BackendEngine(name, default_backend())
    if name in _NATIVE_NAMES:
        return BackendEngine(name, NATIVE, "tcp" if name == BackendName.TCP else None)
    if name in _UNSUPPORTED:
        raise UnsupportedOperation(
            f"backend={backend!r} needs {_UNSUPPORTED[name]} and is not supported; shoal communicates CPU "
            'tensors: use "gloo" or None for the native engine'
        )
    known = ", ".join(sorted({BackendName.SHOAL, *_NATIVE_NAMES, *backend_names()}))
    raise UsageError(f"backend={backend!r} is unknown; expected one of {known}")


def _device_and_name(part: str) -> tuple[str, str]:
    device, _, name = part.rpartition(":")
    return device or "cpu", name


def refuse_device(operation: str, device: torch.device | int | None) -> None:
    """Raise UnsupportedOperation unless ``device`` is None or the CPU."""
    if device is not None and (isinstance(device, int) or torch.device(device).type != "cpu"):
        raise UnsupportedOperation(
            f"{operation}: device_id={device!r}: shoal communicates CPU tensors; omit device_id"
        )


def get_backend(group: GroupLike = None) -> str:
    """Return the backend name that :func:`init_process_group` was called with, ``"shoal"`` by default."""
    world = default_group("get_backend")
    if is_non_member(group):
        raise UsageError(f"get_backend on rank {world.rank}: this rank is not in the given group")
    return BackendName(state.backend)


def get_backend_config(group: GroupLike = None) -> str:
    """Return devices and their backends, such as ``"cpu:gloo"``."""
    return f"cpu:{get_backend(group)}"


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return ``"shoal"`` for the CPU; raise UnsupportedOperation for any other device."""
    refuse_device("get_default_backend_for_device", torch.device(device))
    return BackendName.SHOAL


def is_backend_available(backend: str) -> bool:
    """Return whether :func:`init_process_group` accepts this name."""
    try:
        parse_backend(backend)
    except UsageError:
        return False
    return True


def is_gloo_available() -> bool:
    """True: ``"gloo"`` selects the native engine."""
    return True


def is_nccl_available() -> bool:
    """False: shoal communicates CPU tensors."""
    return False


def is_mpi_available() -> bool:
    """Return whether mpi4py is installed, which the backend ``"mpi"`` needs."""
    return find_spec("mpi4py") is not None


def is_ucc_available() -> bool:
    """False: shoal does not run over UCC."""
    return False


def is_xccl_available() -> bool:
    """False: shoal communicates CPU tensors."""
    return False
