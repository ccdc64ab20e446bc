"""Names and behaviour of torch.distributed that tests use and that differ between the supported releases.

Tests ask for a feature here and not for a version number.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch.distributed as dist
from torch._C import _distributed_c10d
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

#: ``torch.distributed.gather_single`` (torch 2.14); None: there is none
gather_single = getattr(dist, "gather_single", None)
#: whether groups have hooks around operations (torch 2.14)
HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
#: whether groups in C++ call them in the order of their ids (torch 2.15)
HOOKS_IN_ORDER = hasattr(dist.ProcessGroup, "supports_abort_hooks")
#: classes of torch 2.14; None: there is none
NanCheckHook = getattr(_distributed_c10d, "NanCheckHook", None)
FlightRecorderHook = getattr(_distributed_c10d, "FlightRecorderHook", None)


@contextlib.contextmanager
def perhaps_deprecated() -> Iterator[None]:
    """Ignore torch's FutureWarning for names that are deprecated in some releases and not in others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
