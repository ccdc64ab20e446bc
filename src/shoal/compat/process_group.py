"""Torch's process group on top of a shoal group.

The functions of ``torch.distributed`` and torch's C++ (DDP's reducer, the functional collectives) pass lists
of one tensor and an options object; users of the group object may also pass tensors and keywords.  All
operations return a :class:`~shoal.compat.work.TorchWork` immediately.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..common.copy_refusal import refuses_copies
from ..common.never_compile import never_compile
from ..errors import UnsupportedOperation, UsageError
from ..future import Future
from ..group import ProcessGroup
from ..group.validation.arguments import OperationCall
from ..spec import ANY_SOURCE, SUM, ReduceOp
from ..torch_terms import BACKEND, coalesced
from ..torch_terms.aliased_outputs import with_distinct_outputs
from ..torch_terms.arguments import CLOSE_TIMEOUT_S, reduction
from ..torch_terms.arguments import limit as limit_of
from ..torch_terms.coalesced import combine_futures
from .hooks import Hook, NanCheck, OperationHooks
from .routing import DispatchNotifier, routed
from .tensor_arguments import (
    all_gather_tensors,
    all_reduce_sparse,
    all_reduce_tensors,
    broadcast_tensors,
    is_multi_tensor,
    single_tensor,
    tensors_per_rank,
    waited_tensor,
)
from .work import TorchWork, settle_dropped_works

_Tensors = Any  # torch.Tensor | list[torch.Tensor] | list[list[torch.Tensor]]


@refuses_copies(
    "a process group", "connections to the other ranks", "Keep it outside of the object that you copy"
)
@never_compile
class TorchProcessGroup(dist.ProcessGroup):
    """The group that ``torch.distributed.init_process_group("shoal")`` and ``new_group`` create.

    Use it through torch.distributed; :attr:`group` has shoal's additional features.

    Attributes:
        group: the :class:`shoal.ProcessGroup` that executes the operations.
    """

    group: ProcessGroup
    #: The futures of operations started since the last _start_coalescing; None outside such a block.
    _coalesced: list[Future[Any]] | None = None
    #: whether operation hooks are registered
    _hooked = False

    def __init__(
        self,
        group: ProcessGroup,
        store: Store,
        timeout: timedelta,
        others: dict[str, dist.ProcessGroup] | None = None,
    ) -> None:
        """Wrap a group, which is closed with this one; torch.distributed calls this.

        ``store`` is torch's store for this group only; ``others`` are groups of other backends with the same
        ranks, by device type.
        """
        super().__init__(group.rank, group.size)  # type: ignore[call-arg] # torch's stub lacks it
        self._use(group)
        self._store = store
        #: default timeout of an operation in seconds
        self._seconds = timeout.total_seconds()
        self._others = others or {}
        self._hooks = OperationHooks()
        self._name = group.name
        self._description = ""

    def _use(self, group: ProcessGroup) -> None:
        self.group = group
        group._warns_of_gradients = False

    @functools.cached_property
    def _dispatch_notifier(self) -> DispatchNotifier:
        return DispatchNotifier(self.group.rank, self.group.size)

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
        return self.group._shortcut.number

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
        self._hooks.register("pre", hook_id, hook)
        self._hooked = True

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove the hook with this id, if any."""
        self._hooks.unregister("pre", hook_id)
        self._hooked = bool(self._hooks)

    def register_post_hook(self, hook_id: int, hook: Hook) -> None:
        """Call ``hook(PostHookArgs)`` after every operation was issued, in the order of ids.

        The operation may still be running, and is not cancelled if the hook raises.  Arguments and errors
        are those of :meth:`register_pre_hook`.
        """
        self._hooks.register("post", hook_id, hook)
        self._hooked = True

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove the hook with this id, if any."""
        self._hooks.unregister("post", hook_id)
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
            try:
                self.group.close(CLOSE_TIMEOUT_S)
            finally:
                settle_dropped_works()

    def abort(self) -> None:
        """Abort the group immediately on all ranks: pending operations fail with GroupAborted."""
        self.group.abort("the torch.distributed group was aborted")
        with contextlib.suppress(Exception):
            self.group.close(CLOSE_TIMEOUT_S)
        settle_dropped_works()
        for other in self._others.values():
            other.abort()

    # -- all to all ----------------------------------------------------------------------------

    @routed("ALLREDUCE", inputs="tensors")
    def allreduce(
        self, tensors: _Tensors, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> TorchWork:
        """All-reduce a tensor in place, also a sparse one (SUM and AVG only)."""
        op, _, limit = self._options(opts, timeout, op)
        if is_multi_tensor(tensors):
            every = tensors_per_rank(tensors, "allreduce")
            return self._work(all_reduce_tensors(self.group, every, op, limit), list(tensors))
        x = single_tensor(tensors, "allreduce")
        if x.is_sparse:
            return self._work(all_reduce_sparse(self.group, x, op, limit), [x])
        return self._work(self.group.all_reduce(x, op, timeout=limit), [x])

    @routed("ALLREDUCE_COALESCED", inputs="tensors")
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> TorchWork:
        """All-reduce several tensors in place.  A tensor that is listed twice is reduced once."""
        op, _, limit = self._options(opts)
        future = coalesced.all_reduce(self.group, [waited_tensor(x) for x in tensors], op, limit)
        return self._work(future, list(tensors))

    @routed("ALLGATHER", inputs="inputs", outputs="outputs")
    def allgather(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Gather the tensors of all ranks on all ranks; sizes may differ between ranks.

        Outputs may share memory: then it holds the tensor of the last rank.
        """
        _, _, limit = self._options(opts, timeout)
        if is_multi_tensor(inputs):
            lists = [tensors_per_rank(out, "allgather") for out in outputs]
            here = tensors_per_rank(inputs, "allgather")
            return self._work(all_gather_tensors(self.group, lists, here, limit), lists)
        out, x = tensors_per_rank(outputs, "allgather"), single_tensor(inputs, "allgather")
        return self._work(
            with_distinct_outputs(out, lambda each: self.group.all_gather(each, x, timeout=limit)), out
        )

    @routed("ALLGATHER_COALESCED", inputs="inputs", outputs="outputs")
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Gather several tensors of all ranks: ``outputs[rank][i]`` is that rank's ``inputs[i]``."""
        _, _, limit = self._options(opts)
        there = [[waited_tensor(x) for x in out] for out in outputs]
        here = [waited_tensor(x) for x in inputs]
        future = coalesced.all_gather(self.group, "allgather_coalesced", there, here, limit)
        return self._work(future, [list(out) for out in outputs])

    @routed("ALLGATHER_BASE", inputs="input", outputs="output")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Concatenate the tensors of all ranks in ``output`` on all ranks."""
        _, _, limit = self._options(opts)
        return self._work(
            self.group.all_gather_single(waited_tensor(output), waited_tensor(input), timeout=limit), [output]
        )

    @routed("ALLGATHER_INTO_TENSOR_COALESCED", inputs="inputs", outputs="outputs")
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Call :meth:`all_gather_single` for several tensors."""
        _, _, limit = self._options(opts)
        single = functools.partial(self.group.all_gather_single, timeout=limit)
        return self._each("all_gather_single_coalesced", single, outputs, inputs)

    @routed("REDUCE_SCATTER", inputs="inputs", outputs="outputs")
    def reduce_scatter(
        self,
        outputs: _Tensors,
        inputs: _Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> TorchWork:
        """Reduce one tensor per rank over all ranks; each rank keeps its own result."""
        op, _, limit = self._options(opts, timeout, op)
        out = single_tensor(outputs, "reduce_scatter")
        future = self.group.reduce_scatter(out, tensors_per_rank(inputs, "reduce_scatter"), op, timeout=limit)
        return self._work(future, [out])

    @routed("REDUCE_SCATTER_BASE", inputs="input", outputs="output")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Reduce a tensor over all ranks; each rank keeps its part of the result."""
        op, _, limit = self._options(opts)
        return self._work(
            self.group.reduce_scatter_single(waited_tensor(output), waited_tensor(input), op, timeout=limit),
            [output],
        )

    @routed("REDUCE_SCATTER_TENSOR_COALESCED", inputs="inputs", outputs="outputs")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Call :meth:`reduce_scatter_single` for several tensors."""
        op, _, limit = self._options(opts)
        single = functools.partial(self.group.reduce_scatter_single, op=op, timeout=limit)
        return self._each("reduce_scatter_single_coalesced", single, outputs, inputs)

    @routed("ALLTOALL", inputs="inputs", outputs="outputs")
    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Send a tensor to each rank and receive a tensor from each rank.

        Outputs may share memory: then it holds the tensor of the last rank.
        """
        _, _, limit = self._options(opts, timeout)
        out, there = tensors_per_rank(outputs, "alltoall"), tensors_per_rank(inputs, "alltoall")
        return self._work(
            with_distinct_outputs(out, lambda each: self.group.all_to_all(each, there, timeout=limit)), out
        )

    @routed("ALLTOALL_BASE", inputs="input", outputs="output")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Split ``input`` along dimension 0, send each rank a part; concatenate received parts in ``output``.

        Without split sizes, or with empty ones, the parts are equal.
        """
        _, _, limit = self._options(opts, timeout)
        future = self.group.all_to_all_single(
            waited_tensor(output),
            waited_tensor(input),
            output_split_sizes or None,
            input_split_sizes or None,
            timeout=limit,
        )
        return self._work(future, [output])

    # -- from and to one rank ------------------------------------------------------------------

    @routed("BROADCAST", inputs="tensors", root="opts")
    def broadcast(
        self,
        tensors: _Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Copy the tensor of the root to all other ranks."""
        _, root, limit = self._options(opts, timeout, root=root)
        if is_multi_tensor(tensors):
            which = getattr(opts, "rootTensor", 0)
            every = tensors_per_rank(tensors, "broadcast")
            return self._work(broadcast_tensors(self.group, every, root, which, limit), list(tensors))
        x = single_tensor(tensors, "broadcast")
        return self._work(self.group.broadcast(x, root, timeout=limit), [x])

    @routed("REDUCE", inputs="tensors", root="opts")
    def reduce(
        self,
        tensors: _Tensors,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Reduce a tensor over all ranks into the root's tensor; other ranks' tensors do not change."""
        x = single_tensor(tensors, "reduce")
        op, root, limit = self._options(opts, timeout, op, root)
        return self._work(self.group.reduce(x, root, op, timeout=limit), [x])

    @routed("GATHER", inputs="inputs", outputs="outputs", root="opts")
    def gather(
        self,
        outputs: _Tensors,
        inputs: _Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Gather the tensors of all ranks on the root; sizes may differ between ranks.

        Outputs may share memory: then it holds the tensor of the last rank.  Only the root knows the sizes,
        so this is an all-to-all in which the other ranks receive empty tensors.
        """
        x = single_tensor(inputs, "gather")
        _, root, limit = self._options(opts, timeout, root=root)
        mine = tensors_per_rank(outputs, "gather")
        self._only_at("gather", root, "output tensors", mine)
        nothing = self._empty_like(x)
        there: list[torch.Tensor] = [nothing] * self.group.size
        there[root] = x
        here = mine or [nothing] * self.group.size
        return self._work(
            with_distinct_outputs(here, lambda each: self.group.all_to_all(each, there, timeout=limit)), mine
        )

    @routed("GATHER", inputs="input", outputs="output", root="opts")
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Gather tensors of equal size on one rank, concatenated in ``output`` (torch 2.14 and later).

        Args:
            output: on the root, ``size`` times the elements of ``input``; not used on other ranks.
            input: the same number of elements on every rank.
            opts: ``GatherOptions`` with the root.

        Raises:
            UsageError: the output has the wrong size, or is not contiguous.
        """
        _, root, limit = self._options(opts)
        call, size = self._call("gather_single"), self.group.size
        call.root(root)
        x, out = waited_tensor(input).reshape(-1), self._empty_like(input)
        count = x.numel()
        sent, received = [0] * size, [0] * size
        sent[root] = count
        if self.group.rank == root:
            out, received = waited_tensor(output), [count] * size
            if out.numel() != count * size or not out.is_contiguous():
                call.refuse(
                    f"expected a contiguous output of {count * size} elements ({size} inputs), "
                    f"got shape {list(out.shape)}, strides {list(out.stride())}"
                )
            out = out.view(-1)
        return self._work(self.group.all_to_all_single(out, x, received, sent, timeout=limit), [output])

    @routed("SCATTER", inputs="inputs", outputs="outputs", root="opts")
    def scatter(
        self,
        outputs: _Tensors,
        inputs: _Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Send each rank one of the root's tensors; sizes may differ between ranks.

        Like :meth:`gather`, this is an all-to-all.
        """
        out = single_tensor(outputs, "scatter")
        _, root, limit = self._options(opts, timeout, root=root)
        mine = tensors_per_rank(inputs, "scatter")
        self._only_at("scatter", root, "input tensors", mine)
        nothing = self._empty_like(out)
        here: list[torch.Tensor] = [nothing] * self.group.size
        here[root] = out
        there = mine or [nothing] * self.group.size
        return self._work(self.group.all_to_all(here, there, timeout=limit), [out])

    # -- point to point ------------------------------------------------------------------------

    @routed("SEND", inputs="tensors", root="dst")
    def send(self, tensors: _Tensors, dst: int, tag: int = 0) -> TorchWork:
        """Send a tensor to a rank of the group."""
        x = single_tensor(tensors, "send")
        return self._work(self.group.send(x, dst, tag, timeout=self._seconds), [x])

    @routed("RECV", outputs="tensors", root="src")
    def recv(self, tensors: _Tensors, src: int, tag: int = 0) -> TorchWork:
        """Receive a tensor from a rank of the group."""
        x = single_tensor(tensors, "recv")
        if src == ANY_SOURCE:
            return self._recv_anysource(x, tag)
        return self._work(self.group.recv(x, src, tag, timeout=self._seconds), [x], src)

    @routed("RECV", outputs="tensors")
    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> TorchWork:
        """Receive a tensor from any rank; the work's ``source_rank()`` is the sender."""
        return self._recv_anysource(single_tensor(tensors, "recv_anysource"), tag)

    def _recv_anysource(self, x: torch.Tensor, tag: int) -> TorchWork:
        return self._work(self.group.recv_message(x, ANY_SOURCE, tag, timeout=self._seconds), [x])

    # -- barriers ------------------------------------------------------------------------------

    @routed("BARRIER")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        """Start a barrier, which completes when all ranks have called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None)
        if device is not None and device.type in self._others:
            return self._others[device.type].barrier(opts)  # type: ignore[return-value]
        _, _, limit = self._options(opts, timeout)
        return self._work(self.group.barrier(timeout=limit), [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks have called it.

        Args:
            timeout: None: the group's timeout.
            wait_all_ranks: ignored: the error always names all missing ranks.

        Raises:
            OperationTimeout: on every rank; it names the ranks that did not call it in time.
        """
        self.group.monitored_barrier(timeout=limit_of(timeout) or self._seconds).wait()

    # -- coalescing ----------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block of operations that share one work.  Each operation starts when it is called."""
        if device.type in self._others:
            self._others[device.type]._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        """End the block and return the work of its operations."""
        if device.type in self._others:
            return self._others[device.type]._end_coalescing(device)  # type: ignore[return-value]
        futures, self._coalesced = self._coalesced or [], None
        return self._work(combine_futures(futures), [])

    # -- torch's aliases -----------------------------------------------------------------------

    # torch 2.14 and later look these up from C++ without the underscore.
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- shared --------------------------------------------------------------------------------

    def _options(
        self, opts: Any, timeout: timedelta | None = None, op: Any = None, root: int | None = None
    ) -> tuple[ReduceOp, int, float]:
        """Return reduction, root and timeout, from an options object or from separate arguments."""
        if opts is not None:
            if isinstance(opts, timedelta):
                timeout = opts
            elif isinstance(opts, int):
                root = opts
            elif hasattr(opts, "timeout"):
                op = getattr(opts, "reduceOp", op)
                root = getattr(opts, "rootRank", root)
                timeout = opts.timeout
            else:
                op = opts
        return (
            SUM if op is None else reduction(op),
            0 if root is None else root,
            limit_of(timeout) or self._seconds,
        )

    def _work(self, future: Future[Any], result: Any, source: int | None = None) -> TorchWork:
        if self._coalesced is not None:
            self._coalesced.append(future)
        return TorchWork(future, result, source)

    def _call(self, name: str) -> OperationCall:
        return OperationCall(name, self.group.rank, self.group.size, frozenset())

    def _only_at(self, name: str, root: int, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Check that the root passes one tensor per rank, and other ranks none."""
        call = self._call(name)
        call.root(root)
        expected = call.size if call.rank == root else 0
        if len(tensors) != expected:
            call.refuse(
                f"expected {expected} {what}, got {len(tensors)}: the root, rank {root}, passes one per rank "
                "and every other rank none"
            )

    def _each(
        self,
        name: str,
        operation: Callable[[torch.Tensor, torch.Tensor], Future[Any]],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> TorchWork:
        """Apply ``operation`` to each output and its input, and return one work."""
        if len(outputs) != len(inputs):
            self._call(name).refuse(
                f"expected an output for each input, got {len(outputs)} and {len(inputs)}"
            )
        here, there = [waited_tensor(x) for x in inputs], [waited_tensor(out) for out in outputs]
        return self._work(
            with_distinct_outputs(there, lambda each: combine_futures(map(operation, each, here))),
            list(outputs),
        )

    def _empty_like(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=like.dtype, device=like.device)
