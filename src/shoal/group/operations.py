"""The operations of a group on tensors: collectives and point-to-point messages.

They return a :class:`~shoal.Future` immediately; invalid arguments raise before anything is sent.  ``op=`` is
a :class:`~shoal.ReduceOp`, its name, or torch's.  ``timeout=`` is in seconds from the call and defaults to
the group's; a timeout breaks the group.  ``docs/operations.md`` lists arguments, values and legal dtypes.

Every rank of the group calls collectives in the same order.  Messages are not numbered with them, and may be
sent at any time, from any thread; they are matched by sender and tag, in the order in which they were sent.
Each message contains its dtype and shape, so the receiver need not know them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, overload

import torch
from torch.autograd import profiler

from ..common.arguments import explain_unknown_keywords, keyword_names, unknown_keyword_error
from ..common.formatting import counted
from ..future import Future
from ..spec import ANY_SOURCE, PREMUL_SUM, SUM, Operation, OpKind, ReduceOp, ReduceOpLike
from .staging import Staging, multiply, products, readable, readable_beside
from .submission import OperationSubmitter, map_future
from .validation.arguments import OperationCall, warn_of_gradients

# Looking up a member of an enumeration takes longer than a small message.
_ALL_REDUCE = OpKind.ALL_REDUCE
_BROADCAST = OpKind.BROADCAST
_ALL_GATHER = OpKind.ALL_GATHER
_REDUCE_SCATTER = OpKind.REDUCE_SCATTER
_ALL_TO_ALL = OpKind.ALL_TO_ALL
_BARRIER = OpKind.BARRIER
_SEND = OpKind.SEND
_RECV = OpKind.RECV
_PREMUL_SUM = PREMUL_SUM.code


def operation_label(name: str, group: TensorOperations, *_: object) -> str:
    """Return operation and rank, for errors about keyword arguments."""
    return f"{name} on rank {group._rank}"


class Message(NamedTuple):
    """The result of ``recv_message``: a tensor, the rank that sent it, and its tag."""

    tensor: torch.Tensor
    source: int
    tag: int


class TensorOperations:
    """The operations of a group on tensors, which it checks and passes to its submitter."""

    #: False for torch's functions over a group
    _warns_of_gradients = True

    def __init__(self, submitter: OperationSubmitter) -> None:
        self._submitter = submitter
        # Read by every operation, so not through the submitter.
        self._shortcut = submitter.shortcut
        self._timeout = submitter.timeout
        self._spec = submitter.spec
        self._channel = submitter.channel
        self._rank = submitter.spec.rank
        self._size = len(submitter.spec.ranks)
        self._calls: dict[str, OperationCall] = {}

    def _call(self, name: str) -> OperationCall:
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = OperationCall(name, self._rank, self._size, self._channel.devices)
        return call

    def _raise_unknown_keywords(self, name: str, unknown: Iterable[str]) -> NoReturn:
        """Raise for unknown keywords, in latency-critical operations, which avoid the decorator's cost."""
        raise unknown_keyword_error(
            operation_label(name, self), unknown, keyword_names(getattr(type(self), name))
        )

    @property
    def _scratch_device(self) -> torch.device:
        """The device of the small tensors of composed operations."""
        devices = self._channel.devices
        return torch.device("cpu" if "cpu" in devices else min(devices))

    def _warn_of_gradients(self, name: str, *inputs: torch.Tensor) -> None:
        if self._warns_of_gradients and any(x.requires_grad for x in inputs):
            warn_of_gradients(self._call(name))

    def all_reduce(
        self, x: torch.Tensor, op: ReduceOpLike = SUM, *, timeout: float | None = None, **unknown: NoReturn
    ) -> Future[torch.Tensor]:
        """Reduce ``x`` over all ranks, in place on every rank.

        Args:
            x: a tensor with the same dtype and number of elements on all ranks.
            op: the reduction.

        Returns:
            A future of ``x``.  The result is bitwise equal on all ranks.

        Raises:
            UsageError: the tensor cannot be sent.
            UnsupportedOperation: the reduction is not defined for the dtype.
            GroupError: through the future; CollectiveMismatch, PeerLost, OperationTimeout and others.
        """
        if unknown:
            self._raise_unknown_keywords("all_reduce", unknown)
        if getattr(x, "requires_grad", False):
            self._warn_of_gradients("all_reduce", x)
        reduction = op if op.__class__ is ReduceOp else ReduceOp.of(op)
        seconds = self._timeout if timeout is None else timeout
        if not profiler._is_profiler_enabled:
            future = self._shortcut.submit(_ALL_REDUCE, x, x, reduction.code, -1, seconds)
            if future is not None:
                return future
        call = self._call("all_reduce")
        call.output(x, "x")
        call.reduction(reduction, x.dtype)
        return self._in_place(OpKind.ALL_REDUCE, x, timeout, reduction)

    @explain_unknown_keywords(operation_label)
    def reduce(
        self,
        x: torch.Tensor,
        root: int = 0,
        op: ReduceOpLike = SUM,
        *,
        dst: int | None = None,
        timeout: float | None = None,
    ) -> Future[torch.Tensor | None]:
        """Reduce ``x`` over all ranks into ``x`` of rank ``root``; other ranks' ``x`` is not changed.

        Args:
            dst: torch's name for ``root``.

        Returns:
            A future of ``x`` on ``root`` and of None on other ranks.
        """
        call = self._call("reduce")
        root = call.named_root(root, "dst", dst)
        reduction = ReduceOp.of(op)
        output = x if self._rank == root else None
        if (future := self._quick(OpKind.REDUCE, x, output, reduction, root, timeout)) is not None:
            return future
        call.tensor(x, "x")
        self._warn_of_gradients(call.name, x)
        if self._rank == root:
            call.output(x, "x")
            return self._in_place(OpKind.REDUCE, x, timeout, call.reduction(reduction, x.dtype), root)
        call.reduction(reduction, x.dtype)
        sources = [readable(x)]
        if reduction.code == _PREMUL_SUM:
            self._submitter.check_operation(timeout)
            sources, reduction = products(sources, reduction.factor, self._channel), PREMUL_SUM
        return self._submitter.submit(OpKind.REDUCE, sources, (), timeout, reduction, root)

    def broadcast(
        self,
        x: torch.Tensor,
        root: int = 0,
        *,
        src: int | None = None,
        timeout: float | None = None,
        **unknown: NoReturn,
    ) -> Future[torch.Tensor]:
        """Copy ``x`` of rank ``root`` into ``x`` of all other ranks.

        Args:
            src: torch's name for ``root``.

        Returns:
            A future of ``x``.
        """
        if unknown:
            self._raise_unknown_keywords("broadcast", unknown)
        if src is not None:
            root = self._call("broadcast").named_root(root, "src", src)
        if root.__class__ is int and root >= 0:
            source = x if root == self._rank else None
            seconds = self._timeout if timeout is None else timeout
            if not profiler._is_profiler_enabled:
                future = self._shortcut.submit(_BROADCAST, source, x, 0, root, seconds)
                if future is not None:
                    return future
        call = self._call("broadcast")
        call.root(root)
        if self._rank != root:
            call.output(x, "x")
            return self._in_place(OpKind.BROADCAST, x, timeout, SUM, root)
        call.tensor(x, "x")
        source = readable(x)
        submitted = self._submitter.submit(OpKind.BROADCAST, (source,), (source,), timeout, SUM, root)
        return submitted if source is x else map_future(submitted, lambda _: x)

    @overload
    def all_gather(
        self, x: torch.Tensor, /, *, timeout: float | None = None
    ) -> Future[list[torch.Tensor]]: ...

    @overload
    def all_gather(
        self, out: Sequence[torch.Tensor], x: torch.Tensor, *, timeout: float | None = None
    ) -> Future[list[torch.Tensor]]: ...

    @explain_unknown_keywords(operation_label)
    def all_gather(
        self, out: Any = None, x: Any = None, *, timeout: float | None = None
    ) -> Future[list[torch.Tensor]]:
        """Gather the tensors of all ranks on all ranks: ``all_gather(x)`` or ``all_gather(out, x)``.

        Args:
            out: one tensor per rank, as large as that rank's part; sizes may differ between ranks.  Without
                it, tensors like ``x`` are allocated: all parts must have the same shape.
            x: this rank's part.

        Returns:
            A future of the list ``out``: element *r* is the part of rank *r*.
        """
        if x is None:
            out, x = None, out
        call = self._call("all_gather")
        if out is None:
            call.tensor(x, "x")
            out = [x.new_empty(x.shape) for _ in range(self._size)]
        if (future := self._quick(_ALL_GATHER, x, out, SUM, -1, timeout)) is not None:
            return future
        call.tensor(x, "x")
        self._warn_of_gradients(call.name, x)
        call.tensors(out, "out", outputs=True)
        call.same_dtype(x, "x", out[0], "out[0]")
        call.count(out[self._rank], f"out[{self._rank}]", x.numel(), "the size of x")
        sizes = [part.numel() for part in out]
        return self._scatter_gather(OpKind.ALL_GATHER, [x], out, list(out), timeout, sizes=sizes)

    def all_gather_single(
        self, out: torch.Tensor, x: torch.Tensor, *, timeout: float | None = None, **unknown: NoReturn
    ) -> Future[torch.Tensor]:
        """Gather the tensors of all ranks on all ranks, concatenated in ``out``.

        Args:
            out: a tensor of any shape with ``size`` times as many elements as ``x``.
            x: this rank's part, of the same size on all ranks.

        Returns:
            A future of ``out``.
        """
        if unknown:
            self._raise_unknown_keywords("all_gather_single", unknown)
        if getattr(x, "requires_grad", False):
            self._warn_of_gradients("all_gather_single", x)
        seconds = self._timeout if timeout is None else timeout
        if not profiler._is_profiler_enabled:
            future = self._shortcut.submit(_ALL_GATHER, x, out, 0, -1, seconds)
            if future is not None:
                return future
        call = self._call("all_gather_single")
        call.tensor(x, "x")
        call.output(out, "out")
        call.same_dtype(out, "out", x, "x")
        call.count(out, "out", x.numel() * self._size, f"{x.numel()} in x, times the ranks")
        sizes = [x.numel()] * self._size
        return self._scatter_gather(OpKind.ALL_GATHER, [x], [out], out, timeout, sizes=sizes)

    @explain_unknown_keywords(operation_label)
    def reduce_scatter(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceOpLike = SUM,
        *,
        timeout: float | None = None,
    ) -> Future[torch.Tensor]:
        """Reduce each of ``inputs`` over all ranks; rank *r* gets the result of ``inputs[r]``.

        Args:
            out: receives this rank's part.
            inputs: one tensor per rank; sizes may differ within the list, but not between ranks.
            op: the reduction.

        Returns:
            A future of ``out``.
        """
        call = self._call("reduce_scatter")
        reduction = ReduceOp.of(op)
        if (future := self._quick(_REDUCE_SCATTER, inputs, out, reduction, -1, timeout)) is not None:
            return future
        call.tensors(inputs, "inputs")
        self._warn_of_gradients(call.name, *inputs)
        call.output(out, "out")
        call.same_dtype(out, "out", inputs[0], "inputs[0]")
        part = inputs[self._rank].numel()
        call.count(out, "out", part, f"the size of inputs[{self._rank}]")
        call.reduction(reduction, out.dtype)
        sizes = [x.numel() for x in inputs]
        return self._scatter_gather(
            OpKind.REDUCE_SCATTER, inputs, [out], out, timeout, reduction, sizes=sizes
        )

    def reduce_scatter_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        op: ReduceOpLike = SUM,
        *,
        timeout: float | None = None,
        **unknown: NoReturn,
    ) -> Future[torch.Tensor]:
        """Reduce ``x`` over all ranks; rank *r* gets the *r*-th of ``size`` equal parts of the result.

        Args:
            out: receives this rank's part.
            x: a tensor of any shape with ``size`` times as many elements as ``out``.
            op: the reduction.

        Returns:
            A future of ``out``.
        """
        if unknown:
            self._raise_unknown_keywords("reduce_scatter_single", unknown)
        if getattr(x, "requires_grad", False):
            self._warn_of_gradients("reduce_scatter_single", x)
        reduction = ReduceOp.of(op)
        seconds = self._timeout if timeout is None else timeout
        if not profiler._is_profiler_enabled:
            future = self._shortcut.submit(_REDUCE_SCATTER, x, out, reduction.code, -1, seconds)
            if future is not None:
                return future
        call = self._call("reduce_scatter_single")
        call.tensor(x, "x")
        call.output(out, "out")
        call.same_dtype(out, "out", x, "x")
        call.count(x, "x", out.numel() * self._size, f"{out.numel()} in out, times the ranks")
        reduction = call.reduction(op, x.dtype)
        sizes = [out.numel()] * self._size
        return self._scatter_gather(OpKind.REDUCE_SCATTER, [x], [out], out, timeout, reduction, sizes=sizes)

    @explain_unknown_keywords(operation_label)
    def gather(
        self,
        x: torch.Tensor,
        out: Sequence[torch.Tensor] | None = None,
        root: int = 0,
        *,
        dst: int | None = None,
        sizes: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Future[list[torch.Tensor] | None]:
        """Gather the tensors of all ranks on rank ``root``.

        Args:
            x: this rank's part.
            out: on ``root`` one tensor per rank, or None to allocate them; None on other ranks.
            root: the rank that receives all parts.
            dst: torch's name for ``root``.
            sizes: number of elements of every rank's part, the same list on all ranks; needed only if the
                parts differ in size.

        Returns:
            A future of the list ``out`` on ``root`` and of None on other ranks.
        """
        call = self._call("gather")
        root = call.named_root(root, "dst", dst)
        if sizes is None:
            if out is None and self._rank == root:
                call.tensor(x, "x")
                out = [x.new_empty(x.shape) for _ in range(self._size)]
            if (future := self._quick(OpKind.GATHER, x, out, SUM, root, timeout)) is not None:
                return future
        call.tensor(x, "x")
        self._warn_of_gradients(call.name, x)
        counts = call.sizes(sizes, x.numel(), "x")
        if self._rank != root:
            if out is not None:
                call.refuse(f"only root, rank {root}, passes out")
            return self._scatter_gather(OpKind.GATHER, [x], [], None, timeout, root=root, sizes=counts)
        if out is None:
            out = [x.new_empty(count) for count in counts]
        else:
            call.tensors(out, "out", outputs=True)
            call.same_dtype(x, "x", out[0], "out[0]")
            for i, part in enumerate(out):
                call.count(part, f"out[{i}]", counts[i], "the part of that rank")
        return self._scatter_gather(OpKind.GATHER, [x], out, list(out), timeout, root=root, sizes=counts)

    @explain_unknown_keywords(operation_label)
    def scatter(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None = None,
        root: int = 0,
        *,
        src: int | None = None,
        sizes: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Future[torch.Tensor]:
        """Send one tensor from rank ``root`` to each rank.

        Args:
            out: receives this rank's part.
            inputs: on ``root`` one tensor per rank; None on other ranks.
            root: the rank that sends the parts.
            src: torch's name for ``root``.
            sizes: number of elements of every rank's part, the same list on all ranks; needed only if the
                parts differ in size.

        Returns:
            A future of ``out``.
        """
        call = self._call("scatter")
        root = call.named_root(root, "src", src)
        if sizes is None and (
            (future := self._quick(OpKind.SCATTER, inputs, out, SUM, root, timeout)) is not None
        ):
            return future
        call.output(out, "out")
        counts = call.sizes(sizes, out.numel(), "out")
        if self._rank != root:
            if inputs is not None:
                call.refuse(f"only root, rank {root}, passes inputs")
            inputs = []
        else:
            if inputs is None:
                call.refuse(f"root must pass inputs, a list of {counted(self._size, 'tensor')}")
            call.tensors(inputs, "inputs")
            self._warn_of_gradients(call.name, *inputs)
            call.same_dtype(out, "out", inputs[0], "inputs[0]")
            for i, part in enumerate(inputs):
                call.count(part, f"inputs[{i}]", counts[i], "the part of that rank")
        return self._scatter_gather(OpKind.SCATTER, inputs, [out], out, timeout, root=root, sizes=counts)

    @explain_unknown_keywords(operation_label)
    def all_to_all(
        self, out: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, timeout: float | None = None
    ) -> Future[list[torch.Tensor]]:
        """Send ``inputs[r]`` to rank *r*, and receive from rank *r* in ``out[r]``.

        Args:
            out, inputs: one tensor per rank.  Sizes may differ; ``out[r]`` must have the size of the part
                that rank *r* sends.

        Returns:
            A future of the list ``out``.
        """
        call = self._call("all_to_all")
        if (future := self._quick(_ALL_TO_ALL, inputs, out, SUM, -1, timeout)) is not None:
            return future
        call.tensors(inputs, "inputs")
        self._warn_of_gradients(call.name, *inputs)
        call.tensors(out, "out", outputs=True)
        call.same_dtype(out[0], "out[0]", inputs[0], "inputs[0]")
        own = inputs[self._rank].numel()
        call.count(out[self._rank], f"out[{self._rank}]", own, f"the size of inputs[{self._rank}]")
        return self._scatter_gather(OpKind.ALL_TO_ALL, inputs, out, list(out), timeout)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        **unknown: NoReturn,
    ) -> Future[torch.Tensor]:
        """Split ``x`` along its first dimension, send part *r* to rank *r*, and concatenate in ``out``.

        Args:
            out, x: part *r* of ``out`` has as many elements as the part that rank *r* sends.
            output_splits, input_splits: length of each rank's part along the first dimension; None: equal
                parts.

        Returns:
            A future of ``out``.
        """
        if unknown:
            self._raise_unknown_keywords("all_to_all_single", unknown)
        if getattr(x, "requires_grad", False):
            self._warn_of_gradients("all_to_all_single", x)
        if output_splits is None and input_splits is None:
            seconds = self._timeout if timeout is None else timeout
            if not profiler._is_profiler_enabled:
                future = self._shortcut.submit(_ALL_TO_ALL, x, out, 0, -1, seconds)
                if future is not None:
                    return future
        call = self._call("all_to_all_single")
        call.tensor(x, "x")
        call.output(out, "out")
        call.same_dtype(out, "out", x, "x")
        outgoing = call.splits(input_splits, x, "input")
        incoming = call.splits(output_splits, out, "output")
        sent = outgoing[self._rank] * math.prod(x.shape[1:])
        received = incoming[self._rank] * math.prod(out.shape[1:])
        if sent != received:
            call.refuse(
                f"this rank's part for itself has {counted(sent, 'element')} in x (shape {tuple(x.shape)}), "
                f"but {received} in out (shape {tuple(out.shape)})"
            )
        staging = Staging()
        with torch.no_grad():
            inputs = torch.split(readable(x).detach(), outgoing)
            outputs = torch.split(staging.writable(out).detach(), incoming)
        return self._scatter_gather(OpKind.ALL_TO_ALL, inputs, outputs, out, timeout, staging=staging)

    def barrier(self, *, timeout: float | None = None, **unknown: NoReturn) -> Future[None]:
        """Return a future that completes when every rank of the group has called this."""
        if unknown:
            self._raise_unknown_keywords("barrier", unknown)
        seconds = self._timeout if timeout is None else timeout
        if not profiler._is_profiler_enabled:
            future = self._shortcut.submit(_BARRIER, None, None, 0, -1, seconds)
            if future is not None:
                return future
        return self._submitter.submit(_BARRIER, (), (), timeout)

    # -- messages ------------------------------------------------------------------------------

    def send(
        self,
        x: torch.Tensor,
        dst: int,
        tag: int = 0,
        *,
        timeout: float | None = None,
        **unknown: NoReturn,
    ) -> Future[None]:
        """Send ``x`` to rank ``dst``.

        Args:
            x: any dense tensor.  It must not be changed before the future completes.
            dst: a rank of the group, other than this one.
            tag: 0 to 2**30 - 1; the receiver must pass the same tag.

        Returns:
            A future that completes when ``x`` may be changed; the message may not have arrived yet.
        """
        if unknown:
            self._raise_unknown_keywords("send", unknown)
        if not profiler._is_profiler_enabled:
            seconds = self._timeout if timeout is None else timeout
            future = self._shortcut.message(_SEND, x, dst, tag, seconds)
            if future is not None:
                return future
        return self._submitter.submit_messages(
            [self._send_operation(self._call("send"), x, dst, tag, timeout)]
        )[0]

    def recv(
        self,
        x: torch.Tensor | None = None,
        src: int = ANY_SOURCE,
        tag: int = 0,
        *,
        timeout: float | None = None,
        **unknown: NoReturn,
    ) -> Future[torch.Tensor]:
        """Receive a tensor from rank ``src``.

        Args:
            x: the tensor to fill, with the dtype and number of elements of the message.  None: allocate a
                tensor with the dtype and shape of the message.
            src: a rank of the group, other than this one, or ANY_SOURCE (-1).
            tag: the tag of the message.

        Returns:
            A future of the tensor.  :meth:`recv_message` also returns the rank of the sender.
        """
        if unknown:
            self._raise_unknown_keywords("recv", unknown)
        if not profiler._is_profiler_enabled:
            seconds = self._timeout if timeout is None else timeout
            future = self._shortcut.message(_RECV, x, src, tag, seconds)
            if future is not None:
                return future
        return self._recv("recv", x, src, tag, timeout, lambda message: message.tensor)

    @explain_unknown_keywords(operation_label)
    def recv_message(
        self,
        x: torch.Tensor | None = None,
        src: int = ANY_SOURCE,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> Future[Message]:
        """Receive like :meth:`recv`; the future's value is a :class:`Message` with the sender's rank."""
        return self._recv("recv_message", x, src, tag, timeout, lambda message: message)

    # -- shared --------------------------------------------------------------------------------

    def _quick(
        self, kind: OpKind, x: Any, out: Any, op: ReduceOp, root: int, timeout: float | None
    ) -> Future[Any] | None:
        """Submit a collective by the fast path; None if it must be checked and submitted as usual.

        Args:
            x, out: the user's tensor, or list of a tensor for each rank, or None.
        """
        inputs = x if isinstance(x, (list, tuple)) else (x,)
        if profiler._is_profiler_enabled or any(getattr(each, "requires_grad", False) for each in inputs):
            return None
        return self._shortcut.submit(
            kind, x, out, op.code, root, self._timeout if timeout is None else timeout
        )

    def _in_place(
        self, kind: OpKind, x: torch.Tensor, timeout: float | None, op: ReduceOp, root: int = -1
    ) -> Future[Any]:
        staging = Staging()
        y = staging.writable(x, keep=True)
        if op.code == _PREMUL_SUM:
            self._submitter.check_operation(timeout)
            multiply(y, op.factor)
            op = PREMUL_SUM
        future = self._submitter.submit(
            kind, [y] if kind is not OpKind.BROADCAST else [], [y], timeout, op, root
        )
        return _staged(future, staging, x) if staging.needed else future

    def _scatter_gather(
        self,
        kind: OpKind,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        value: Any,
        timeout: float | None,
        op: ReduceOp = SUM,
        root: int = -1,
        *,
        sizes: Sequence[int] = (),
        staging: Staging | None = None,
    ) -> Future[Any]:
        """Submit an operation with separate inputs and outputs; the future's value is ``value``."""
        staging = staging or Staging()
        targets = [staging.writable(x) for x in outputs]
        if op.code == _PREMUL_SUM:
            self._submitter.check_operation(timeout)
            plain = [readable(x) for x in inputs]
            sources, op = products(plain, op.factor, self._channel), PREMUL_SUM
        else:
            sources = readable_beside(inputs, targets)
        future = self._submitter.submit(kind, sources, targets, timeout, op, root, sizes)
        if staging.needed or not (value is None or value is targets[0]):
            return _staged(future, staging, value)
        return future

    # The next three are for batches too.

    def _recv(
        self, name: str, x: torch.Tensor | None, src: int, tag: int, timeout: float | None, value: Any
    ) -> Future[Any]:
        staging = Staging()
        operation = self._recv_operation(self._call(name), x, src, tag, timeout, staging)
        return self._received(self._submitter.submit_messages([operation])[0], x, staging, value)

    def _send_operation(
        self, call: OperationCall, x: torch.Tensor, dst: int, tag: int, timeout: float | None
    ) -> Operation:
        call.tensor(x, "x")
        peer = call.peer(dst, "dst")
        return self._submitter.message(OpKind.SEND, (readable(x),), (), timeout, peer, call.tag(tag))

    def _recv_operation(
        self,
        call: OperationCall,
        x: torch.Tensor | None,
        src: int,
        tag: int,
        timeout: float | None,
        staging: Staging,
    ) -> Operation:
        outputs: tuple[torch.Tensor, ...] = ()
        if x is not None:
            call.output(x, "x")
            outputs = (staging.writable(x),)
        peer = src if src == ANY_SOURCE else call.peer(src, "src")
        return self._submitter.message(OpKind.RECV, (), outputs, timeout, peer, call.tag(tag))

    @staticmethod
    def _received(future: Future[Any], x: torch.Tensor | None, staging: Staging, value: Any) -> Future[Any]:
        def finish(arrived: tuple[torch.Tensor, int, int]) -> Any:
            staging.copy_back()
            tensor, source, tag = arrived
            return value(Message(tensor if x is None else x, source, tag))

        return map_future(future, finish)


def _staged(future: Future[Any], staging: Staging, value: Any) -> Future[Any]:
    def finish(_: Any) -> Any:
        staging.copy_back()
        return value

    return map_future(future, finish)
