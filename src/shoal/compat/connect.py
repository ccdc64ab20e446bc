"""Creation of a connected shoal group from the arguments of a torch.distributed backend.

Torch passes a store that the ranks share.  The default group connects through it, unless its ranks have
connected by the launcher's variables (:mod:`shoal.compat.launcher_store`).  Later groups use the connections
of the default group, without further communication, if that is a group of shoal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore

from .. import config
from ..backend.base import check_options
from ..backend.identity import Tuning
from ..backend.registry import BackendFactory, backend_factory, default_backend
from ..common import torch_features
from ..errors import UsageError
from ..group import ProcessGroup
from ..group.group_argument import default_groups
from ..initialize import world_group
from ..net import Deadline
from ..rendezvous import rendezvous_at
from ..store import adopt
from ..torch_terms import BACKEND
from .launcher_store import group_timeout, launcher_store, rendezvous_point
from .process_group import TorchProcessGroup
from .reconfigure.process_group import ReconfigurableProcessGroup, Reconfigurer
from .reconfigure.reconfiguration import Settings

#: timeout, in seconds, of closing the group after its creation failed
_CLOSE_TIMEOUT_S = 5.0


def create(options: Any, backend_options: Mapping[str, Any] | Backend.Options | None) -> TorchProcessGroup:
    """Return the group that torch requests.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        backend_options: the user's ``pg_options``: None, or a mapping of options of :func:`shoal.init`
            (``transport``, ``concurrency``, ...).  Options of torch's own backends are ignored, as Gloo does;
            their timeout is in ``options`` already.
    """
    met = launcher_store(options.store)
    try:
        return _create(options, backend_options)
    except BaseException as error:
        if met is not None:
            met.abandon(error)
        raise


def _create(options: Any, backend_options: Mapping[str, Any] | Backend.Options | None) -> TorchProcessGroup:
    if isinstance(backend_options, Backend.Options):
        backend_options = None
    if backend_options is not None and not isinstance(backend_options, Mapping):
        raise UsageError(
            f"pg_options for the backend {BACKEND!r} must be a mapping of options of shoal.init, such as "
            f'{{"concurrency": 4}}, got {type(backend_options).__name__}'
        )
    # Torch passes neither the user's backend string nor its parts for other devices to this function, and
    # drops the backends of other devices if a whole group is returned.
    config_string = str(sys._getframe(3).f_locals.get("backend", BACKEND))
    default = _default_group()
    timeout = group_timeout(options.timeout)
    if torch_features.enables_reconfigure(options):
        return _reconfigurable(options, timeout, dict(backend_options or {}), config_string)
    if options.global_ranks_in_group and default is not None:
        # The group is identified by its members and a counter, not by torch's name: from torch 2.14 on,
        # new_group(use_local_synchronization=True) gives later groups different names on different ranks.
        group = default.subgroup(
            list(options.global_ranks_in_group),
            timeout=timeout.total_seconds(),
            **dict(backend_options or {}),
        )
    else:
        group = _connect(options, timeout.total_seconds(), dict(backend_options or {}))
    try:
        others = {
            device: _group(torch.device(device), name, options)
            for device, name in other_backends(config_string).items()
        }
        return TorchProcessGroup(group, options.store, timeout, others)
    except BaseException:
        group.close(_CLOSE_TIMEOUT_S)
        raise


def _default_group() -> ProcessGroup | None:
    """Return shoal's group of all ranks if torch's default group uses this backend."""
    default = dist.group.WORLD if dist.is_initialized() else None
    return default.group if isinstance(default, TorchProcessGroup) else None


default_groups.append(_default_group)


def _checked(extra: dict[str, Any]) -> tuple[BackendFactory, Tuning]:
    """Check the environment and ``pg_options``, and remove the tuning from the latter."""
    config.check_environment()
    tuning = Tuning.chosen(extra.pop("concurrency", None), extra.pop("algorithm", None))
    factory = backend_factory(default_backend())
    check_options(factory, extra, f"pg_options of the backend {BACKEND!r}", ["concurrency", "algorithm"])
    return factory, tuning


def _reconfigurable(
    options: Any, timeout: timedelta, extra: dict[str, Any], backends: str
) -> ReconfigurableProcessGroup:
    if named := other_backends(backends):
        raise UsageError(
            f"enable_reconfigure=True with the backends {backends!r}: torch reconfigures groups of one "
            f'backend only; expected init_process_group("{BACKEND}", enable_reconfigure=True), without '
            f"{', '.join(named)}"
        )
    if launcher_store(options.store) is not None:
        raise UsageError(
            "enable_reconfigure=True needs a store that outlives the ranks: set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, or pass a store to init_process_group"
        )
    factory, tuning = _checked(extra)
    settings = Settings(options.store, "world", factory, tuning, extra)
    reconfigurer = Reconfigurer(settings, options.group_rank, options.group_size)
    return ReconfigurableProcessGroup(reconfigurer, options.store, timeout)


def _connect(options: Any, limit: float, extra: dict[str, Any]) -> ProcessGroup:
    factory, tuning = _checked(extra)
    # Without ranks it is torch's default group; otherwise the default group has another backend.
    partial = bool(options.global_ranks_in_group)
    name = options.group_id if partial else "world"
    met = launcher_store(options.store)
    membership = None if met is None else met.take()
    if membership is None:
        rank, size = options.group_rank, options.group_size
        membership = rendezvous_at(
            rendezvous_point(
                adopt(options.store), rank, size, options.group_id, Deadline(limit), partial=partial
            )
        )
    return world_group(membership, factory, name=name, timeout=limit, tuning=tuning, options=extra)


# -- groups of torch's own backends, for devices that shoal does not support ---------------------
#
# ``init_process_group("cpu:shoal,cuda:nccl")`` makes one group of two backends.  Torch treats a backend
# written in Python as a whole process group and keeps only that one, so shoal's group creates the others.


_BackendType = dist.ProcessGroup.BackendType


def other_backends(backends: str) -> dict[str, str]:
    """Return device type -> backend for devices other than the CPU in ``backends`` ("device:name,...")."""
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
