"""Torch's process group methods, implemented with the operations of :class:`shoal.ProcessGroup`.

The functions of ``torch.distributed`` and torch's C++ (DDP's reducer, the functional collectives) pass lists
of one tensor and an options object; users of the group object may also pass tensors and keywords.  All
methods return a :class:`~shoal.compat.work.TorchWork` immediately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..common.uncompiled import uncompiled
from ..future import Future
from ..group import ProcessGroup
from ..group.validation.arguments import OperationCall
from ..spec import ANY_SOURCE, SUM, ReduceOp
from ..torch_terms import coalesced
from ..torch_terms.coalesced import together
from ..torch_terms.durations import limit as limit_of
from ..torch_terms.in_turn import in_turn
from ..torch_terms.reductions import reduction
from . import sparse_all_reduce, tensor_lists
from .hooks import OperationHooks
from .routing import hooked, routed
from .shown import Shown
from .tensor_arguments import are_several, only, parts, real
from .work import TorchWork

_Tensors = Any  # torch.Tensor | list[torch.Tensor] | list[list[torch.Tensor]]


@uncompiled
class TorchCollectives(dist.ProcessGroup):
    """The operations; :class:`~shoal.compat.TorchProcessGroup` adds identity and lifecycle."""

    #: the group that executes the operations
    group: ProcessGroup
    #: default timeout of an operation in seconds
    _seconds: float
    #: groups of other backends, by device type
    _others: dict[str, dist.ProcessGroup]
    #: The futures of operations started since the last _start_coalescing; None outside such a block.
    _coalesced: list[Future[Any]] | None = None
    #: whether operation hooks are registered
    _hooked = False

    @functools.cached_property
    def _hooks(self) -> OperationHooks:
        return OperationHooks()

    @functools.cached_property
    def _shown(self) -> Shown:
        return Shown(self.group.rank, self.group.size)

    # -- all to all ----------------------------------------------------------------------------

    @routed("ALLREDUCE", inputs="tensors")
    def allreduce(
        self, tensors: _Tensors, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> TorchWork:
        """All-reduce a tensor in place, also a sparse one (SUM and AVG only)."""
        op, _, limit = self._options(opts, timeout, op)
        if are_several(tensors):
            every = parts(tensors, "allreduce")
            return self._work(tensor_lists.all_reduce(self.group, every, op, limit), list(tensors))
        x = only(tensors, "allreduce")
        if x.is_sparse:
            return self._work(sparse_all_reduce.all_reduce(self.group, x, op, limit), [x])
        return self._work(self.group.all_reduce(x, op, timeout=limit), [x])

    @routed("ALLREDUCE_COALESCED", inputs="tensors")
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> TorchWork:
        """All-reduce several tensors in place.  A tensor that is listed twice is reduced once."""
        op, _, limit = self._options(opts)
        future = coalesced.all_reduce(self.group, [real(x) for x in tensors], op, limit)
        return self._work(future, list(tensors))

    @routed("ALLGATHER", inputs="inputs", outputs="outputs")
    def allgather(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Gather the tensors of all ranks on all ranks; sizes may differ between ranks.

        Outputs may share memory: then it holds the tensor of the last rank.
        """
        _, _, limit = self._options(opts, timeout)
        if are_several(inputs):
            lists = [parts(out, "allgather") for out in outputs]
            here = parts(inputs, "allgather")
            return self._work(tensor_lists.all_gather(self.group, lists, here, limit), lists)
        out, x = parts(outputs, "allgather"), only(inputs, "allgather")
        return self._work(in_turn(out, lambda each: self.group.all_gather(x, each, timeout=limit)), out)

    @routed("ALLGATHER_COALESCED", inputs="inputs", outputs="outputs")
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Gather several tensors of all ranks: ``outputs[rank][i]`` is that rank's ``inputs[i]``."""
        _, _, limit = self._options(opts)
        there = [[real(x) for x in out] for out in outputs]
        here = [real(x) for x in inputs]
        future = coalesced.all_gather(self.group, "allgather_coalesced", there, here, limit)
        return self._work(future, [list(out) for out in outputs])

    @routed("ALLGATHER_BASE", inputs="input", outputs="output")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Concatenate the tensors of all ranks in ``output`` on all ranks."""
        _, _, limit = self._options(opts)
        return self._work(self.group.all_gather_single(real(output), real(input), timeout=limit), [output])

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
        out = only(outputs, "reduce_scatter")
        future = self.group.reduce_scatter(out, parts(inputs, "reduce_scatter"), op, timeout=limit)
        return self._work(future, [out])

    @routed("REDUCE_SCATTER_BASE", inputs="input", outputs="output")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Reduce a tensor over all ranks; each rank keeps its part of the result."""
        op, _, limit = self._options(opts)
        return self._work(
            self.group.reduce_scatter_single(real(output), real(input), op, timeout=limit), [output]
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
        out, there = parts(outputs, "alltoall"), parts(inputs, "alltoall")
        return self._work(in_turn(out, lambda each: self.group.all_to_all(each, there, timeout=limit)), out)

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
            real(output), real(input), output_split_sizes or None, input_split_sizes or None, timeout=limit
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
        if are_several(tensors):
            which = getattr(opts, "rootTensor", 0)
            every = parts(tensors, "broadcast")
            return self._work(tensor_lists.broadcast(self.group, every, root, which, limit), list(tensors))
        x = only(tensors, "broadcast")
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
        x = only(tensors, "reduce")
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
        x = only(inputs, "gather")
        _, root, limit = self._options(opts, timeout, root=root)
        mine = parts(outputs, "gather")
        self._only_at("gather", root, "output tensors", mine)
        nothing = self._nothing(x)
        there: list[torch.Tensor] = [nothing] * self.group.size
        there[root] = x
        here = mine or [nothing] * self.group.size
        return self._work(in_turn(here, lambda each: self.group.all_to_all(each, there, timeout=limit)), mine)

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
        x, out = real(input).reshape(-1), self._nothing(input)
        count = x.numel()
        sent, received = [0] * size, [0] * size
        sent[root] = count
        if self.group.rank == root:
            out, received = real(output), [count] * size
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
        out = only(outputs, "scatter")
        _, root, limit = self._options(opts, timeout, root=root)
        mine = parts(inputs, "scatter")
        self._only_at("scatter", root, "input tensors", mine)
        nothing = self._nothing(out)
        here: list[torch.Tensor] = [nothing] * self.group.size
        here[root] = out
        there = mine or [nothing] * self.group.size
        return self._work(self.group.all_to_all(here, there, timeout=limit), [out])

    # -- point to point ------------------------------------------------------------------------

    @routed("SEND", inputs="tensors", root="dst")
    def send(self, tensors: _Tensors, dst: int, tag: int = 0) -> TorchWork:
        """Send a tensor to a rank of the group."""
        x = only(tensors, "send")
        return self._work(self.group.send(x, dst, tag, timeout=self._seconds), [x])

    @routed("RECV", outputs="tensors", root="src")
    def recv(self, tensors: _Tensors, src: int, tag: int = 0) -> TorchWork:
        """Receive a tensor from a rank of the group."""
        x = only(tensors, "recv")
        return self._work(self.group.recv_message(x, src, tag, timeout=self._seconds), [x])

    @routed("RECV", outputs="tensors")
    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> TorchWork:
        """Receive a tensor from any rank; the work's ``source_rank()`` is the sender."""
        x = only(tensors, "recv_anysource")
        return self._work(self.group.recv_message(x, ANY_SOURCE, tag, timeout=self._seconds), [x])

    # -- barriers ------------------------------------------------------------------------------

    @hooked("BARRIER")
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
        return self._work(together(futures), [])

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

    def _work(self, future: Future[Any], result: Any) -> TorchWork:
        if self._coalesced is not None:
            self._coalesced.append(future)
        return TorchWork(future, result)

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
        here, there = [real(x) for x in inputs], [real(out) for out in outputs]
        return self._work(in_turn(there, lambda each: together(map(operation, each, here))), list(outputs))

    def _nothing(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=like.dtype, device=like.device)
