"""Torch's backend names and the engines they select.

``"gloo"``, torch's CPU backend, selects shoal's native engine, and ``"tcp"``, torch's first name for that
backend, the native engine over TCP only.  None and ``"shoal"`` select the backend of ``SHOAL_BACKEND``.
``"nccl"`` selects shoal's engine over NCCL, whose groups also take CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ..backend.registry import NATIVE, NCCL, backend_names, default_backend
from ..errors import UnsupportedOperation, UsageError
from ..torch_terms import BACKEND
from .state import GroupLike, default_group, is_non_member, state

#: Torch's backends without a counterpart in shoal -> the hardware or library that each needs.
_UNSUPPORTED = {
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
        backend: a name, ``"cpu:name"`` or ``"cpu:name,cuda:nccl"``; None means ``"shoal"``, the
            backend of ``SHOAL_BACKEND``.

    Raises:
        UnsupportedOperation: a backend of torch without a counterpart here, or backends of other devices.
        UsageError: no backend is registered under that name.
    """
    if backend is None:
        backend = BackendName.SHOAL
    if not isinstance(backend, str):
        raise UsageError(f"backend={backend!r}: expected a str")
    parts = [part.strip() for part in backend.lower().split(",")]
    names = dict(_device_and_name(part) for part in parts)
    is_listed_twice = len(names) != len(parts)
    cpu_name, cuda_name = names.pop("cpu", NATIVE), names.pop("cuda", None)
    native = cpu_name in (*_NATIVE_NAMES, NATIVE, BackendName.SHOAL)
    wrong_device = f"cpu:{NCCL}" in parts or cuda_name not in (None, NCCL)
    if names or is_listed_twice or wrong_device or (cuda_name is not None and not native):
        raise UnsupportedOperation(
            f"backend={backend!r}: shoal has no such backends for these devices; use "
            '"gloo", "cpu:gloo" or None, or for CUDA "nccl" or "cpu:gloo,cuda:nccl"'
        )
    transport = "tcp" if cpu_name == BackendName.TCP else None
    name = cpu_name if cuda_name is None else NCCL
    if name in backend_names():
        return BackendEngine(name, name, transport)
    if name == BackendName.SHOAL:
        return BackendEngine(name, default_backend())
    if name in _NATIVE_NAMES:
        return BackendEngine(name, NATIVE, transport)
    if name in _UNSUPPORTED:
        raise UnsupportedOperation(
            f"backend={backend!r} needs {_UNSUPPORTED[name]} and is not supported; "
            'use "gloo" or None for the native engine'
        )
    known = ", ".join(sorted({BackendName.SHOAL, *_NATIVE_NAMES, *backend_names()}))
    raise UsageError(f"backend={backend!r} is unknown; expected one of {known}")


def _device_and_name(part: str) -> tuple[str, str]:
    device, _, name = part.rpartition(":")
    return device or "cpu", name


def refuse_device(operation: str, device: torch.device | int | None, backend: str = NATIVE) -> None:
    """Raise UnsupportedOperation unless ``device`` is None, the CPU, or a CUDA device for NCCL."""
    if device is None:
        return
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cpu" and (found.type != "cuda" or backend != NCCL):
        raise UnsupportedOperation(
            f"{operation}: device_id={device!r}: the backend {backend!r} communicates CPU tensors; "
            "omit device_id"
        )


def get_backend(group: GroupLike = None) -> str:
    """Return the backend name that :func:`init_process_group` was called with, ``"shoal"`` by default."""
    world = default_group("get_backend")
    if is_non_member(group):
        raise UsageError(f"get_backend on rank {world.rank}: this rank is not in the given group")
    return BackendName(state.backend)


def get_backend_config(group: GroupLike = None) -> str:
    """Return devices and their backends, such as ``"cpu:gloo"``."""
    name = get_backend(group)
    return f"cpu:{NATIVE},cuda:{NCCL}" if name == NCCL else f"cpu:{name}"


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return ``"shoal"`` for the CPU and ``"nccl"`` for CUDA.

    Raises:
        UnsupportedOperation: ``device`` is another one.
    """
    if torch.device(device).type == "cuda":
        return BackendName.NCCL
    refuse_device("get_default_backend_for_device", torch.device(device))
    return BackendName.SHOAL


def is_backend_available(backend: str) -> bool:
    """Return whether :func:`init_process_group` accepts this name."""
    try:
        engine = parse_backend(backend)
    except UsageError:
        return False
    return engine.backend != NCCL or is_nccl_available()


def is_gloo_available() -> bool:
    """True: ``"gloo"`` selects the native engine."""
    return True


def is_nccl_available() -> bool:
    """Return whether torch finds a CUDA device, and nccl4py is installed, which ``"nccl"`` needs."""
    return find_spec("nccl") is not None and torch.cuda.is_available()


def is_mpi_available() -> bool:
    """Return whether mpi4py is installed, which the backend ``"mpi"`` needs."""
    return find_spec("mpi4py") is not None


def is_ucc_available() -> bool:
    """False: shoal does not run over UCC."""
    return False


def is_xccl_available() -> bool:
    """False: shoal has no backend for Intel's GPUs."""
    return False
