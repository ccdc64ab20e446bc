"""Names and behaviour of torch.distributed that tests use and that differ between the supported releases.

Tests ask for a feature here and not for a version number.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ErrorType as ErrorType
from torch.distributed import _functional_collectives as functional

#: ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` until torch 2.12, and their older names
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
#: the same of ``torch.distributed._functional_collectives``
functional_all_gather_single = getattr(functional, "all_gather_single", functional.all_gather_tensor)
functional_reduce_scatter_single = getattr(
    functional, "reduce_scatter_single", functional.reduce_scatter_tensor
)
#: whether ``torch.distributed.monitored_barrier`` takes groups of any backend (torch 2.14) or of Gloo alone
MONITORED_BARRIER_FOR_ANY_BACKEND = hasattr(dist, "gather_single")
#: whether there is ``torch.distributed._reconfigure`` (torch 2.14)
HAS_RECONFIGURE = hasattr(dist, "_reconfigure")

#: whether ``new_group`` has ``sort_ranks`` (torch 2.12)
SORT_RANKS = "sort_ranks" in inspect.signature(dist.new_group).parameters
#: Gloo has ``all_to_all`` and gathers tensors without dimensions, it refuses a rank that is given twice, and
#: functions with ``get_rank(group)`` of a group in Python can be compiled, in the same releases
GLOO_ALL_TO_ALL = GLOO_GATHERS_SCALARS = REFUSES_RANKS_GIVEN_TWICE = COMPILES_GET_RANK = SORT_RANKS
#: whether several threads can compile with Dynamo, one after another: in torch 2.11 the second one ends the
#: process by SIGSEGV, without shoal too
COMPILES_IN_THREADS = SORT_RANKS
#: whether ``barrier`` has ``timeout`` (torch 2.12)
BARRIER_TIMEOUT = "timeout" in inspect.signature(dist.barrier).parameters
#: parameters that some functions do not have in every supported release: name -> parameters
LATER_PARAMETERS = {
    "barrier": {"timeout"},  # torch 2.12
    "new_group": {"sort_ranks"},  # torch 2.12
    "split_group": {"backend"},  # torch 2.13
}
#: whether stores have ``barrier`` (torch 2.12)
STORE_BARRIER = hasattr(dist.Store, "barrier")
#: ``torch.distributed.gather_single`` (torch 2.14); None: there is none
gather_single = getattr(dist, "gather_single", None)
#: whether groups have hooks around operations (torch 2.14)
HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
#: whether groups in C++ call them in the order of their ids (torch 2.15)
HOOKS_IN_ORDER = hasattr(dist.ProcessGroup, "supports_abort_hooks")
#: classes of torch 2.14; None: there is none
NanCheckHook = getattr(_distributed_c10d, "NanCheckHook", None)
FlightRecorderHook = getattr(_distributed_c10d, "FlightRecorderHook", None)


def all_to_all(outputs: Any, inputs: Any, group: Any = None, async_op: bool = False) -> Any:
    """``torch.distributed.all_to_all``; until torch 2.11, where Gloo has none, messages over Gloo."""
    if GLOO_ALL_TO_ALL or dist.get_backend(group) != "gloo":
        return dist.all_to_all(outputs, inputs, group=group, async_op=async_op)
    inputs = [x.clone() for x in inputs]
    rank = dist.get_rank(group)
    for peer, (out, x) in enumerate(zip(outputs, inputs, strict=True)):
        if peer == rank:
            out.copy_(x)
            continue
        sent = dist.isend(x, group=group, group_dst=peer)
        dist.recv(out, group=group, group_src=peer)
        sent.wait()
    return _Complete() if async_op else None


def sync_buffers() -> dict[str, bool]:
    """The argument that lets ``DistributedDataParallel`` send buffers before each forward pass.

    Until torch 2.12 it is ``broadcast_buffers``, which is deprecated later.
    """
    from torch.nn.parallel import DistributedDataParallel

    later = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if later else "broadcast_buffers": True}


def fsdp_has_reduce_scatter_group() -> bool:
    """Whether FSDP can reduce gradients in a group of its own (torch 2.13)."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_separate_reduce_scatter_group")


def pipelines_keep_messages_local() -> bool:
    """Whether a rank with two neighboring stages of a pipeline sends no message to itself (torch 2.12).

    Gloo and shoal refuse such a message.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    return hasattr(PipelineScheduleMulti, "_initialize_pp_stages")


class _Complete:
    """The handle of an operation that is complete."""

    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def perhaps_deprecated() -> Iterator[None]:
    """Ignore torch's FutureWarning for names that are deprecated in some releases and not in others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
