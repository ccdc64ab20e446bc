"""Groups of torch's own backends, for devices that shoal does not support.

``init_process_group("cpu:shoal,cuda:nccl")`` makes one group of two backends.  Torch treats a backend written
in Python as a whole process group and keeps only that one, so shoal's group creates the other backends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..errors import UsageError
from ..torch_terms import BACKEND

_BackendType = dist.ProcessGroup.BackendType


def others(backends: str, options: Any) -> dict[str, dist.ProcessGroup]:
    """Create the groups for the devices other than the CPU in ``backends``.

    Args:
        backends: as for ``init_process_group``: a name, or ``"device:name,..."``.
        options: torch's ``_DistributedBackendOptions``, with a store for this group only.
    """
    found = other_backends(backends)
    return {device: _group(torch.device(device), name, options) for device, name in found.items()}


def other_backends(backends: str) -> dict[str, str]:
    """Return device type -> backend for the devices other than the CPU in ``backends``."""
    if ":" not in backends:
        return {}
    table = dict(pair.lower().split(":", 1) for pair in backends.split(","))
    for device, name in table.items():
        if (name == BACKEND) != (device == "cpu"):
            raise UsageError(
                f"backends {backends!r}: {BACKEND} takes CPU tensors, but {device!r} is assigned "
                f'{name!r}; expected "cpu:{BACKEND},<device>:<its backend>"'
            )
    return {device: name for device, name in table.items() if device != "cpu"}


def _group(device: torch.device, name: str, options: Any) -> dist.ProcessGroup:
    store = PrefixStore(f"{device.type}/", options.store)
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    backend: Any
    if name == "nccl" and dist.is_nccl_available():
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = timeout
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        backend, kind = dist.ProcessGroupNCCL(store, rank, size, settings), _BackendType.NCCL
    elif name == "gloo" and dist.is_gloo_available():
        backend, kind = dist.ProcessGroupGloo(store, rank, size, timeout=timeout), _BackendType.GLOO
    else:
        raise UsageError(
            f"backend {name!r} for {device.type}: besides {BACKEND}, nccl and gloo are supported if "
            "this build of torch contains them"
        )
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    group._set_group_name(options.group_id)
    return group
