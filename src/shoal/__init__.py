"""shoal: communication and data-parallel training for PyTorch.

    import shoal, torch

    group = shoal.init()
    group.all_reduce(torch.ones(1024)).wait()

Public names are loaded when they are first used, so that ``import shoal`` and the ``shoal`` command do not
import torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import errors as _errors
from .common import torch_release as _torch_release

if TYPE_CHECKING:
    from . import backend as backend
    from . import compat as compat
    from . import config as config
    from . import controller as controller
    from . import distributed as distributed
    from . import elastic as elastic
    from . import errors as errors
    from . import functional as functional
    from . import future as future
    from . import group as group
    from . import parallel as parallel
    from . import recorder as recorder
    from . import rendezvous as rendezvous
    from . import rpc as rpc
    from . import spec as spec
    from . import store as store
    from . import streams as streams
    from . import testing as testing
    from .backend.base import Backend as Backend
    from .backend.base import DataChannel as DataChannel
    from .backend.base import GroupSpec as GroupSpec
    from .backend.registry import register_backend as register_backend
    from .controller import Event as Event
    from .controller import Stream as Stream
    from .controller import init_master_worker as init_master_worker
    from .errors import *  # noqa: F403
    from .future import Future as Future
    from .future import collect_all as collect_all
    from .future import wait_all as wait_all
    from .future import wait_any as wait_any
    from .group import Agreement as Agreement
    from .group import Batch as Batch
    from .group import Message as Message
    from .group import ProcessGroup as ProcessGroup
    from .group import Rebuilt as Rebuilt
    from .group import profiler_handler as profiler_handler
    from .initialize import init as init
    from .parallel import DistributedDataParallel as DistributedDataParallel
    from .parallel import HierarchicalModelAverager as HierarchicalModelAverager
    from .parallel import Join as Join
    from .parallel import Joinable as Joinable
    from .parallel import JoinHook as JoinHook
    from .parallel import MixedPrecision as MixedPrecision
    from .parallel import PeriodicModelAverager as PeriodicModelAverager
    from .parallel import PostLocalSGDOptimizer as PostLocalSGDOptimizer
    from .parallel import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from .rendezvous import Membership as Membership
    from .rendezvous import register_rendezvous as register_rendezvous
    from .spec import ANY_SOURCE as ANY_SOURCE
    from .spec import Operation as Operation
    from .spec import OpKind as OpKind
    from .spec import ReduceOp as ReduceOp
    from .store import FileStore as FileStore
    from .store import MemoryStore as MemoryStore
    from .store import PrefixStore as PrefixStore
    from .store import Store as Store
    from .store import TCPStore as TCPStore
    from .store import TCPStoreServer as TCPStoreServer
    from .store import register_store as register_store
    from .tracing import trace as trace

__version__ = "0.1.0"

# An unsupported release must not prevent `import torch`: then compat.registration warns.
if not (_torch_release.torch_is_importing() or _torch_release.is_doctor()):
    _torch_release.check()

#: submodule -> its public names; the block above has the same for type checkers
_PUBLIC = {
    "backend.base": ["Backend", "DataChannel", "GroupSpec"],
    "backend.registry": ["register_backend"],
    "controller": ["Event", "Stream", "init_master_worker"],
    "future": ["Future", "collect_all", "wait_all", "wait_any"],
    "group": ["Agreement", "Batch", "Message", "ProcessGroup", "Rebuilt", "profiler_handler"],
    "initialize": ["init"],
    "parallel": [
        "DistributedDataParallel",
        "HierarchicalModelAverager",
        "Join",
        "JoinHook",
        "Joinable",
        "MixedPrecision",
        "PeriodicModelAverager",
        "PostLocalSGDOptimizer",
        "ZeroRedundancyOptimizer",
    ],
    "rendezvous": ["Membership", "register_rendezvous"],
    "spec": ["ANY_SOURCE", "OpKind", "Operation", "ReduceOp"],
    "store": [
        "FileStore",
        "MemoryStore",
        "PrefixStore",
        "Store",
        "TCPStore",
        "TCPStoreServer",
        "register_store",
    ],
    "tracing": ["trace"],
}
_PUBLIC["errors"] = [
    name
    for name, value in vars(_errors).items()
    if isinstance(value, type) and issubclass(value, _errors.ShoalError)
]
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
#: modules that are available after ``import shoal``, as in ``shoal.errors.PeerLost``
_SUBMODULES = (
    "backend", "compat", "config", "controller", "distributed", "elastic", "errors", "functional", "future",
    "group", "parallel", "recorder", "rendezvous", "rpc", "spec", "store", "streams", "testing",
)  # fmt: skip

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)  # sets the attribute too
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value: object = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


# If shoal is installed, importing torch does this too (entry point torch.backends).
if "torch" in sys.modules:
    from . import compat as compat
