"""Calls to other workers of a job: functions, and objects that stay where they are.

    with shoal.rpc.join("trainer0") as agent:
        ps = agent.peer("ps")                          # as soon as "ps" has joined
        future = ps.call(torch.add, torch.ones(2), 1)  # a shoal.Future

``functional`` has the functions of torch.distributed.rpc over an agent of the process.

Bytes move in the native endpoint (``connection/post.py``), everything else is here: ``connection`` has the
directory of workers and makes connections, ``codec`` encodes values, and ``calls`` has the caller's half
(``call.py``), the callee's (``serving.py``), whose threads are in ``executor.py``, and references.

Whoever can call a worker can run any code there; ``docs/security.md`` says how strangers are kept out.
"""

from . import functions
from .agent import Agent
from .calls.current import Current, current
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

#: names of torch.distributed.rpc that are not here -> why, and what to use instead
_NOT_HERE = {
    "dist_autograd": "no graph of autograd goes over a call; send x.detach(), and gradients as tensors",
    "PyRRef": "shoal.rpc.RRef is the only class of references",
    "RpcBackendOptions": "shoal.rpc.TensorPipeRpcBackendOptions is the only class of options",
    "RpcAgent": "shoal.rpc.Agent is what shoal.rpc.join gives",
    "TensorPipeAgent": "shoal.rpc.Agent is what shoal.rpc.join gives",
    "backend_registry": "there is one way in which calls travel",
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
