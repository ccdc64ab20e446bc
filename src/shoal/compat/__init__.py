"""The backend "shoal" of torch.distributed.

    import torch.distributed as dist

    dist.init_process_group("shoal")            # or "cpu:shoal", "cpu:shoal,cuda:nccl"

Import order: ``registration`` (imported with shoal, so it must be cheap) -> ``connect`` (from torch's store
to a group) -> ``process_group`` -> ``work``.  See ``docs/compatibility.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registration import register

if TYPE_CHECKING:
    from .process_group import TorchProcessGroup as TorchProcessGroup
    from .torch_store import TorchStore as TorchStore
    from .work import TorchWork as TorchWork

_MODULES = {"TorchProcessGroup": "process_group", "TorchStore": "torch_store", "TorchWork": "work"}

__all__ = ["TorchProcessGroup", "TorchStore", "TorchWork"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


register()
