"""RPC between the workers of a job: calls of functions, and references to remote objects.

    with shoal.rpc.join("trainer0") as agent:
        ps = agent.peer("ps")                          # waits until "ps" has joined
        future = ps.call(torch.add, torch.ones(2), 1)  # a shoal.Future

- ``functional``: the functions of torch.distributed.rpc, with one agent per process.
- ``connection``: the directory of workers and their connections; ``endpoint.py`` wraps the native one, which
  sends and receives the bytes.
- ``codec``: encodes and decodes values.
- ``calls``: the caller (``call.py``), the callee (``serving.py``; its threads are in ``executor.py``), and
  references.

A process that can call a worker can run any code there; see ``docs/security.md`` for access control.
"""

from . import functions
from .agent import Agent
from .calls.context import Current, current
from .calls.reference import Actor, RRef
from .calls.serving import async_execution
from .functional import (
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from .join import join
from .options import BackendType, TensorPipeRpcBackendOptions
from .peer import Peer, WorkerInfo

__all__ = [
    "Actor",
    "Agent",
    "BackendType",
    "Current",
    "Peer",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "async_execution",
    "current",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "join",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

#: names of torch.distributed.rpc that this package does not have -> the reason, and the replacement
_NOT_HERE = {
    "dist_autograd": "calls do not record an autograd graph; send x.detach(), and gradients as tensors",
    "PyRRef": "shoal.rpc.RRef is the only class of references",
    "RpcBackendOptions": "shoal.rpc.TensorPipeRpcBackendOptions is the only class of options",
    "RpcAgent": "shoal.rpc.join returns a shoal.rpc.Agent",
    "TensorPipeAgent": "shoal.rpc.join returns a shoal.rpc.Agent",
    "backend_registry": "there is only one backend for calls",
    **dict.fromkeys(
        ("enable_gil_profiling", "RemoteProfilerManager", "server_process_global_profiler"),
        "torch.profiler shows calls, and Agent.stats() counts them",
    ),
    **dict.fromkeys(
        ("AllGatherStates", "api", "constants", "internal", "method_factory", "new_method"),
        "it is internal to torch",
    ),
}


def __getattr__(name: str) -> object:
    instead = _NOT_HERE.get(name)
    because = "" if instead is None else f": {instead}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{because}")
