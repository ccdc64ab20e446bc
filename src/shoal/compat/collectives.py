"""Torch's methods of a process group, each on top of one operation of :class:`shoal.ProcessGroup`.

Torch calls them in three ways: ``torch.distributed``'s functions and torch's C++ (DDP's reducer, the
functional collectives) with lists of one tensor and an options object; users of the group object also
with bare tensors and keywords.  All of them return a :class:`~shoal.compat.work.TorchWork` at once.
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

    #: the group below
    group: ProcessGroup
    #: default timeout of an operation in seconds
    _seconds: float
    #: groups of other backends, by the type of the devices whose tensors they take
    _others: dict[str, dist.ProcessGroup]
    #: The futures of operations begun since the last _start_coalescing; None outside such a block.
    _coalesced: list[Future[Any]] | None = None
    #: whether there are hooks around operations
    _hooked = False

    @functools.cached_property
    def _hooks(self) -> OperationHooks:
        return OperationHooks()

    @functools.cached_property
    def _shown(self) -> Shown:
        return Shown(self.group.rank, self.group.size)

    # -- everybody to everybody ----------------------------------------------------------------

    @routed("ALLREDUCE", inputs="tensors")
    def allreduce(
        self, tensors: _Tensors, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> TorchWork:
        """Reduce a tensor over all ranks, in place; sparse ones too (SUM only)."""
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
        """Reduce several tensors over all ranks, in place; one that is named twice is reduced once."""
        op, _, limit = self._options(opts)
        future = coalesced.all_reduce(self.group, [real(x) for x in tensors], op, limit)
        return self._work(future, list(tensors))

    @routed("ALLGATHER", inputs="inputs", outputs="outputs")
    def allgather(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Bring every rank's tensor to all ranks; sizes may differ from rank to rank.

        Outputs may share memory: the tensor of the last rank stays.
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
        """Bring several tensors of every rank to all ranks: ``outputs[rank][i]`` is its ``inputs[i]``."""
        _, _, limit = self._options(opts)
        there = [[real(x) for x in out] for out in outputs]
        here = [real(x) for x in inputs]
        future = coalesced.all_gather(self.group, "allgather_coalesced", there, here, limit)
        return self._work(future, [list(out) for out in outputs])

    @routed("ALLGATHER_BASE", inputs="input", outputs="output")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Bring every rank's tensor to all ranks, one after another in ``output``."""
        _, _, limit = self._options(opts)
        return self._work(self.group.all_gather_single(real(output), real(input), timeout=limit), [output])

    @routed("ALLGATHER_INTO_TENSOR_COALESCED", inputs="inputs", outputs="outputs")
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """:meth:`all_gather_single` for several tensors."""
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
        """Reduce one tensor per rank over all ranks, and leave each rank its own."""
        op, _, limit = self._options(opts, timeout, op)
        out = only(outputs, "reduce_scatter")
        future = self.group.reduce_scatter(out, parts(inputs, "reduce_scatter"), op, timeout=limit)
        return self._work(future, [out])

    @routed("REDUCE_SCATTER_BASE", inputs="input", outputs="output")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Reduce a tensor over all ranks, and leave each rank its part of the result."""
        op, _, limit = self._options(opts)
        return self._work(
            self.group.reduce_scatter_single(real(output), real(input), op, timeout=limit), [output]
        )

    @routed("REDUCE_SCATTER_TENSOR_COALESCED", inputs="inputs", outputs="outputs")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """:meth:`reduce_scatter_single` for several tensors."""
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
        """Send a tensor to each rank and receive one from each.

        Outputs may share memory: the tensor of the last rank stays.
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
        """Cut ``input`` along its first dimension and send each rank its part; ``output`` gets what arrives.

        No, or empty, split sizes mean equal parts.
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
        """Copy the tensor of one rank to all others."""
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
        """Reduce a tensor over all ranks into that of one; the others keep theirs."""
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
        """Bring every rank's tensor to one rank; sizes may differ from rank to rank.

        Outputs may share memory: the tensor of the last rank stays.  Only the rank that receives knows the
        sizes, so this is an all-to-all with nothing for the others.
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
        """Gather tensors of one size on one rank, concatenated in ``output`` (torch 2.14 and later).

        Args:
            output: on the root, ``size`` times as many elements as ``input``; not used on other ranks.
            input: the same number of elements on every rank.
            opts: ``GatherOptions`` with the root.

        Raises:
            UsageError: the output has another size, or is not contiguous.
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
        """Hand each rank one tensor of one rank's; sizes may differ from rank to rank.

        The opposite of :meth:`gather`.
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

    # -- one to one ----------------------------------------------------------------------------

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
        """Receive a tensor from any rank; the work's ``source_rank()`` tells from which."""
        x = only(tensors, "recv_anysource")
        return self._work(self.group.recv_message(x, ANY_SOURCE, tag, timeout=self._seconds), [x])

    # -- barriers ------------------------------------------------------------------------------

    @hooked("BARRIER")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        """Complete when every rank has called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None)
        if device is not None and device.type in self._others:
            return self._others[device.type].barrier(opts)  # type: ignore[return-value]
        _, _, limit = self._options(opts, timeout)
        return self._work(self.group.barrier(timeout=limit), [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until every rank has called it.

        Args:
            timeout: None: the group's.
            wait_all_ranks: makes no difference: all ranks that did not come are named always.

        Raises:
            OperationTimeout: on every rank; it names the ranks that did not come in time.
        """
        self.group.monitored_barrier(timeout=limit_of(timeout) or self._seconds).wait()

    # -- several together ----------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block whose operations get one handle.  Each of them starts when it is called."""
        if device.type in self._others:
            self._others[device.type]._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        """The handle of everything that was begun in the block."""
        if device.type in self._others:
            return self._others[device.type]._end_coalescing(device)  # type: ignore[return-value]
        futures, self._coalesced = self._coalesced or [], None
        return self._work(together(futures), [])

    # -- torch's other names for the same ------------------------------------------------------

    # From C++, torch 2.14 and later look these up without the underscore.
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
        """Reduction, root and timeout, from an options object or from the arguments in its place."""
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
        """One tensor per rank is given on ``root``, and none elsewhere."""
        call = self._call(name)
        call.root(root)
        expected = call.size if call.rank == root else 0
        if len(tensors) != expected:
            call.refuse(
                f"expected {expected} {what}, got {len(tensors)}: rank {root}, the root, gives one per rank, "
                "and no other rank gives any"
            )

    def _each(
        self,
        name: str,
        operation: Callable[[torch.Tensor, torch.Tensor], Future[Any]],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> TorchWork:
        """``operation`` on each output and its input, under one handle."""
        if len(outputs) != len(inputs):
            self._call(name).refuse(
                f"expected an output for each input, got {len(outputs)} and {len(inputs)}"
            )
        here, there = [real(x) for x in inputs], [real(out) for out in outputs]
        return self._work(in_turn(there, lambda each: together(map(operation, each, here))), list(outputs))

    def _nothing(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=like.dtype, device=like.device)
