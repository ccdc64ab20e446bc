"""torch.distributed's functions on shoal's groups, for porting existing scripts.

    import shoal.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(tensor)
    dist.destroy_process_group()

Names, arguments and their order are torch's.  ``docs/distributed.md`` lists all names: the supported ones,
the differences, and why others are missing.  ``dist.group.WORLD`` and the results of ``dist.new_group`` are
:class:`shoal.ProcessGroup` objects, so the object API works on them.

=====================  ==================================================================
``state``              the default group, the only global state in shoal
``lifecycle``          creating and destroying it, and parsing ``init_method``
``groups``             ranks and sizes of groups, and new groups
``collectives``        operations on tensors, also under torch's old names
``point_to_point``     messages, single and in batches
``objects``            operations on Python objects
``work``               the handle that an operation returns with ``async_op=True``
``backend``, ``stores``  torch's names for shoal's backends and stores
=====================  ==================================================================

The names of the :mod:`master-worker mode <shoal.controller>` are here too: ``init_master_worker``, ``node``
and ``FloatTensor`` etc.  They are imported on first use, because that mode is a layer above this package.
"""

from ..group import ProcessGroup
from ..spec import ReduceOp
from ..torch_terms.arguments import _make_nccl_premul_sum as _make_nccl_premul_sum
from ..torch_terms.arguments import default_pg_timeout, supports_complex
from .backend import BackendName as Backend
from .backend import (
    get_backend,
    get_backend_config,
    get_default_backend_for_device,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
)
from .collectives import _all_gather_base as _all_gather_base
from .collectives import _reduce_scatter_base as _reduce_scatter_base
from .collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    monitored_barrier,
    reduce,
    reduce_op,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from .groups import (
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_num_processes,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    split_group,
)
from .lifecycle import (
    destroy_process_group,
    init_process_group,
    is_available,
    is_initialized,
    is_torchelastic_launched,
    rebuild,
)
from .objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from .point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from .state import GroupMember, group
from .stores import HashStore, Store
from .stores import TorchFileStore as FileStore
from .stores import TorchPrefixStore as PrefixStore
from .stores import TorchTCPStore as TCPStore
from .work import Work

__all__ = [
    "Backend",
    "FileStore",
    "GroupMember",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_num_processes",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "rebuild",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
    "supports_complex",
]

_TENSOR_KINDS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")

#: The names of the master-worker mode -> the module of ``shoal.controller`` that defines each.
_MASTER_WORKER_NAMES = {
    **dict.fromkeys((f"{kind}Tensor" for kind in _TENSOR_KINDS), "api.typed_tensors"),
    "init_master_worker": "api.typed_tensors",
    "node": "tensor.node_devices",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _MASTER_WORKER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"shoal.controller.{_MASTER_WORKER_NAMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MASTER_WORKER_NAMES})
