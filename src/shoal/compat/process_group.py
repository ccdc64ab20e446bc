"""Torch's process group on top of a shoal group: identity, hooks, subgroups and shutdown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._distributed_c10d import ProcessGroup as TorchGroup

from ..common.copy_refusal import refuses_copies
from ..common.uncompiled import uncompiled
from ..errors import UnsupportedOperation, UsageError
from ..group import ProcessGroup
from ..torch_terms import BACKEND
from ..torch_terms.durations import CLOSING
from .collectives import TorchCollectives
from .hooks import Hook, NanCheck


@refuses_copies(
    "a process group",
    "connections to the other ranks",
    "Keep it outside of the object that you copy",
)
@uncompiled
class TorchProcessGroup(TorchCollectives):
    """The group that ``torch.distributed.init_process_group("shoal")`` and ``new_group`` create.

    Use it through torch.distributed; :attr:`group` has shoal's additional features.

    Attributes:
        group: the :class:`shoal.ProcessGroup` that executes the operations.
    """

    def __init__(
        self,
        group: ProcessGroup,
        store: Store,
        timeout: timedelta,
        others: dict[str, TorchGroup] | None = None,
    ) -> None:
        """Wrap a group; torch.distributed calls this.

        Args:
            group: the shoal group; closed with this one.
            store: torch's store for this group only.
            timeout: the default timeout of operations.
            others: groups of other backends with the same ranks, by device type.
        """
        super().__init__(group.rank, group.size)  # type: ignore[call-arg] # torch's stub lacks it
        self._use(group)
        self._store = store
        self._seconds = timeout.total_seconds()
        self._others = others or {}
        self._name = group.name
        self._description = ""

    def _use(self, group: ProcessGroup) -> None:
        self.group = group
        group._warns_of_gradients = False

    # -- identity ------------------------------------------------------------------------------

    @property
    def __shoal_group__(self) -> ProcessGroup:
        """:attr:`group`, for functions that take groups of shoal (:mod:`shoal.group.group_argument`)."""
        return self.group

    def name(self) -> str:
        """Return the backend's name."""
        return BACKEND

    #: the name called from C++
    getBackendName = name

    def _get_backend_name(self) -> str:
        return BACKEND

    # Torch's C++ sets and reads these for group_name, group_desc, ...; without a C++ backend it does not
    # store them itself.

    def setGroupName(self, name: str) -> None:
        """Set ``group_name``, the key of the group in torch's registry."""
        self._name = name

    def getGroupName(self) -> str:
        """Return ``group_name``."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Set ``group_desc``."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return ``group_desc``."""
        return self._description

    def get_group_store(self) -> Store:
        """Return torch's key-value store of this group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of later operations."""
        if timeout <= timedelta(0):
            raise UsageError(f"set_timeout on rank {self.rank()}: expected a positive time, got {timeout}")
        self._seconds = timeout.total_seconds()
        for other in self._others.values():
            other.set_timeout(timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *map(torch.device, self._others)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type in self._others:
            return self._others[device.type]._get_backend(device)
        if device.type != "cpu":
            # Torch detects a missing backend by catching RuntimeError, a base class of UsageError.
            raise UsageError(
                f"group {self.group_name!r} has no backend for {device.type}; name one when creating the "
                f'group, as in init_process_group("cpu:{BACKEND},{device.type}:nccl")'
            )
        return self

    #: Torch checks these before it uses optional features of a backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    _supports_time_estimate = False  # the name in torch 2.15
    # Needed from torch 2.14 on: the inherited attributes look for a C++ backend and raise.
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False

    def get_reconfigure_handle(self) -> str:
        """Raise: the members of this group do not change."""
        raise self._fixed("get_reconfigure_handle")

    def reconfigure(self, opts: Any) -> Any:
        """Raise: the members of this group do not change."""
        raise self._fixed("reconfigure")

    def _fixed(self, name: str) -> UnsupportedOperation:
        return UnsupportedOperation(
            f"{name} on rank {self.rank()} of group {self.group_name!r}: its members cannot change; create "
            f'the default group with init_process_group("{BACKEND}", enable_reconfigure=True)'
        )

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of ``size`` elements in memory that the group reduces without a copy."""
        if device.type != "cpu":
            return self._get_backend(device).allocate_tensor(size, dtype=dtype, device=device)  # type: ignore[no-any-return]
        return self.group.empty(size, dtype=dtype)

    def _get_sequence_number_for_group(self) -> int:
        return self.group._number

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: shoal's group and torch both count from the start."""

    # -- hooks ---------------------------------------------------------------------------------

    def register_pre_hook(self, hook_id: int, hook: Hook) -> None:
        """Call ``hook(PreHookArgs)`` before every operation, in the order of ids (torch 2.14 and later).

        If a hook raises, the operation is not issued and the exception propagates to the caller.

        Args:
            hook_id: identifies the hook for :meth:`unregister_pre_hook`; replaces a hook with the same id.
            hook: the function.

        Raises:
            UnsupportedOperation: this torch has no such hooks.
        """
        self._hooks.register_before(hook_id, hook)
        self._hooked = True

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove the hook with this id, if any."""
        self._hooks.unregister_before(hook_id)
        self._hooked = bool(self._hooks)

    def register_post_hook(self, hook_id: int, hook: Hook) -> None:
        """Call ``hook(PostHookArgs)`` after every operation was issued, in the order of ids.

        The operation may still be running, and is not cancelled if the hook raises.  Arguments and errors
        are those of :meth:`register_pre_hook`.
        """
        self._hooks.register_after(hook_id, hook)
        self._hooked = True

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove the hook with this id, if any."""
        self._hooks.unregister_after(hook_id)
        self._hooked = bool(self._hooks)

    def _attach_nan_check(self) -> NanCheck:
        """``NanCheckHook.attach`` for this group; see ``torch_features.attach_hooks_to_groups``."""
        return NanCheck(self)

    def _attach_flight_recorder(self, *_: Any) -> None:
        """``FlightRecorderHook.attach`` for this group."""
        raise UnsupportedOperation(
            f"FlightRecorderHook.attach: torch's flight recorder records only C++ backends, and group "
            f"{self.group_name!r} has the backend {BACKEND!r}. shoal records it already: "
            "print(group.group.recorder.dump()), see docs/recorder.md"
        )

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Raise: ``supports_abort_hooks`` is False."""
        self._refuse_hook("register_abort_hook", "wait for operations and catch shoal.GroupError")

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Raise: there are no abort hooks."""
        self._refuse_hook("unregister_abort_hook", "there is nothing to unregister")

    def _register_on_completion_hook(self, hook: Callable[[Any], None]) -> None:
        self._refuse_hook("_register_on_completion_hook", "use work.get_future().then(...)")

    def _refuse_hook(self, name: str, instead: str) -> None:
        raise UnsupportedOperation(
            f"{name} on rank {self.group.rank}: the backend {BACKEND!r} has no such hooks; {instead}"
        )

    def _has_hooks(self) -> bool:
        return False  # completion hooks

    def _wait_for_pending_works(self) -> None:
        """Do nothing: there are no completion hooks to wait for."""

    # -- subgroups -----------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> TorchProcessGroup | None:
        """Create a group of some members of this one; return None on the other ranks.

        ``torch.distributed.split_group`` requires an accelerator; ``new_group`` does the same without one.

        Args:
            ranks: ranks in this group, the same list on all of them.
            timeout: the default timeout of its operations; None: that of this group.
            opts: not used.
            group_name: None: derived from the ranks.
            group_desc: a description.
            device_types: not used: the new group takes CPU tensors.
        """
        if self.group.rank not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{','.join(map(str, ranks))}"
        limit = timedelta(seconds=self._seconds) if timeout is None else timeout
        group = self.group.subgroup(list(ranks), name=name, timeout=limit.total_seconds())
        made = TorchProcessGroup(group, PrefixStore(f"{name}/", self._store), limit)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self.group_desc}:split")
        return made

    #: the name called from C++
    splitGroup = split_group

    # -- shutdown ------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Complete the submitted sends, notify the other ranks and release all resources.  Never hangs."""
        try:
            for other in self._others.values():
                other.shutdown()
        finally:
            self.group.close(CLOSING)

    def abort(self) -> None:
        """Abort the group immediately on all ranks: pending operations fail with GroupAborted."""
        self.group.abort("the torch.distributed group was aborted")
        with contextlib.suppress(Exception):
            self.group.close(CLOSING)
        for other in self._others.values():
            other.abort()
