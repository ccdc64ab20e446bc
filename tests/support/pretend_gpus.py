"""Two devices for torch, "pretend:0" and "pretend:1", for processes of others: the nodes of a master.

:func:`installed_in` makes a folder that torch takes for an installed package with a device; a process that
has the folder on its path has the devices once it imports torch.  They have the CPU's memory and compute at
once, by a fallback for all operators of torch's PrivateUse1; tensors of two devices do not go together.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

COUNT = 2
_CPU, _PRETEND = 1, 12  # kDLCPU and kDLExtDev of DLPack
_libraries: list[Any] = []


def installed_in(folder: Path) -> Path:
    """Install the devices there."""
    info = folder / "pretend_gpus-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pretend-gpus\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\npretend = pretend_gpus:load\n")
    (folder / "pretend_gpus.py").write_text(Path(__file__).read_text())
    return folder


def load() -> None:
    """What torch calls; only the processes of nodes have the devices."""
    if any("shoal.controller.node.serving" in each for each in sys.orig_argv):
        begin()


class _Head(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("index", ctypes.c_int32))


def begin() -> None:
    """Let this process have the devices."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def relabelled(x: Any, kind: int, index: int) -> Any:
        """The same memory as a tensor of another device."""
        capsule = torch._C._to_dlpack(x.detach())  # type: ignore[attr-defined]
        head = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_Head)).contents
        head.type, head.index = kind, index
        return torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]

    def is_pretend(x: object) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type == "pretend"

    def to_cpu(x: Any) -> Any:
        if is_pretend(x):
            return relabelled(x, _CPU, 0)
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == "pretend" else x

    strided = torch.ops.aten.as_strided.default
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def shown(x: Any, size: Any, stride: Any, offset: int | None = None) -> Any:
        """A view of the memory of ``x``; the CPU's kernel does it for tensors of every device."""
        return strided.redispatch(cpu, x, size, stride, offset)

    def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
        name = operator._schema.name.removeprefix("aten::")
        if name == "_copy_from":
            source, target = args[:2]
            to_cpu(target).copy_(to_cpu(source))
            return target
        if name == "as_strided":
            return shown(args[0], *args[1:])
        leaves = tree_leaves((args, kwargs))
        devices = {x.device for x in leaves if is_pretend(x)}
        given = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
        if len(devices) > 1 or (devices and name != "index" and not all(map(is_pretend, given))):
            raise RuntimeError(f"{name}: tensors of {sorted({str(x.device) for x in given})}")
        asked = next((x for x in leaves if isinstance(x, torch.device)), None)
        device = asked or next(iter(devices))
        cpu_args, cpu_kwargs = tree_map(to_cpu, (args, kwargs))
        result = operator(*cpu_args, **cpu_kwargs)
        if device.type != "pretend":
            return result
        written = [a.name for a in operator._schema.arguments if a.alias_info and a.alias_info.is_write]
        if written and result is not None:  # in place: nothing here resizes
            given_by_name = dict(zip([a.name for a in operator._schema.arguments], args, strict=False))
            return (given_by_name | kwargs)[written[0]]

        view = any(a.alias_info is not None for a in operator._schema.returns)

        def to_device(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if view:  # DLPack would begin a storage of its own
                offset = args[0].storage_offset() + x.storage_offset()
                return shown(args[0], x.shape, x.stride(), offset)
            return relabelled(x, _PRETEND, device.index or 0)

        return tree_map(to_device, result)

    class Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, device_index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    class Module:
        """``torch.pretend``."""

        def __init__(self) -> None:
            self.generators = [torch.Generator() for _ in range(COUNT)]

        def _is_in_bad_fork(self) -> bool:
            return False

        def is_available(self) -> bool:
            return True

        def is_initialized(self) -> bool:
            return True

        def device_count(self) -> int:
            return COUNT

        def current_device(self) -> int:
            return 0

        def manual_seed_all(self, seed: int) -> None:
            for generator in self.generators:
                generator.manual_seed(seed)

        def get_rng_state(self, index: int) -> torch.Tensor:
            return self.generators[index].get_state()

        def set_rng_state(self, state: torch.Tensor, index: int) -> None:
            self.generators[index].set_state(state)

    _setup_privateuseone_for_python_backend("pretend", Module(), Hooks())
    library = torch.library.Library("_", "IMPL")
    library.fallback(run, "PrivateUse1")
    _libraries.append(library)
    torch.accelerator.device_count = lambda: COUNT  # type: ignore[assignment]  # torch's guard knows of one
