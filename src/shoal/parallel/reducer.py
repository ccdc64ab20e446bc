"""The gradient reducer: averages the gradients of one model over a group while backward still runs.

A hook on every parameter tells when its gradient is there; when the last one of a bucket has come, the
bucket's all-reduce starts, and the engine moves bytes while autograd goes on.  A callback at the end of
the backward pass waits for all of them.  Buckets are always sent in the order of their index, so that
all ranks issue the same operations whatever order their gradients arrive in.

A backward pass is reduced when it comes through the output of a forward pass that asked for it
(:meth:`Reducer.expect`): hooks on the output open the pass.  Outputs that hold tensors where we do not
find them (objects of unknown classes) open it with the first gradient that arrives.

Ranks may disagree about which parameters the loss used.  A rank that misses some at the end of its pass
sends the incomplete buckets nevertheless and says so in the last of them (``BucketSet.vote``): so nobody
waits in vain, every rank raises the same error, and the group stays whole.

The order in which gradients arrived in the first pass replaces the reverse order of registration, once:
rank 0's order, on all ranks.  (Dynamic discovery of the order is from NVIDIA's Apex; see also
pytorch#17757.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..errors import UnusedParameterError, UsageError
from ..future import Future
from ..group import ProcessGroup
from ..spec import AVG
from .buckets import Bucket, Readiness, build_buckets

_NOTHING, _ATTEND, _TWICE = range(3)  # what Readiness.mark returns


class Reducer:
    """Averages the gradients of ``parameters`` over ``group``.

    Args:
        names: what error messages call the parameters.
        parameters: those that require gradients, in the same order on every rank.
        cap: the largest bucket in bytes.
    """

    def __init__(
        self, group: ProcessGroup, names: Sequence[str], parameters: Sequence[torch.Tensor], *, cap: int
    ) -> None:
        self._group = group
        self._names = tuple(names)
        self._parameters = tuple(parameters)
        self._cap = cap
        self._set = build_buckets(group, self._parameters, range(len(self._parameters) - 1, -1, -1), cap)
        self._readiness = Readiness(self._set.members())
        self._futures: list[Future[torch.Tensor]] = []
        self._finish_is_queued = False
        self._order_is_known = False
        #: Passes that were reduced; equal on all ranks.
        self.passes = 0
        handles = [
            parameter.register_post_accumulate_grad_hook(_gradient_hook(self, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]
        weakref.finalize(self, _remove, handles)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they are reduced."""
        return self._set.buckets

    # -- called around a forward pass ------------------------------------------------------------

    def in_backward(self) -> bool:
        """Whether a backward pass is running that is being reduced (checkpointing runs forward inside)."""
        return self._readiness.opened and torch._C._current_graph_task_id() != -1

    def settle(self) -> None:
        """Bring a pass to its end that an exception interrupted on this rank, together with the other ranks.

        Raises:
            UnusedParameterError: the pass was complete on some ranks, which wait for this one's gradients.
        """
        if self._readiness.opened:
            self._finish(interrupted=True)

    def expect(self, output: Any) -> None:
        """Reduce the backward pass that comes through ``output``."""
        self._readiness.arm()
        enter = _output_hook(self)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(enter)  # type: ignore[no-untyped-call]

    def ignore(self) -> None:
        """Do not reduce the next backward pass."""
        self._readiness.disarm()

    # -- called by autograd ----------------------------------------------------------------------

    def _enter(self) -> None:
        self._readiness.open()
        self._queue_finish()

    def _queue_finish(self) -> None:
        # A callback runs at the end of the graph task in which it was queued.  Reentrant checkpoints have
        # tasks of their own; the hook on the output queues it in the outermost one.
        if not self._finish_is_queued:
            self._finish_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _attend(self, index: int, mark: int) -> None:
        """Something is to do after the gradient of parameter ``index`` arrived."""
        if mark == _TWICE:
            raise UsageError(
                f"the gradient of {self._names[index]!r} on rank {self._group.rank} arrived twice in one "
                "backward pass, because the parameter is used in several reentrant checkpoints; use "
                "torch.utils.checkpoint with use_reentrant=False"
            )
        self._queue_finish()
        self._launch(self._readiness.ready)

    def _launch(self, end: int) -> None:
        """Start the all-reduce of all buckets with an index below ``end`` that were not started yet."""
        while len(self._futures) < end:
            bucket = self._set.buckets[len(self._futures)]
            self._collect(bucket)
            self._futures.append(self._group.all_reduce(bucket.flat, op=AVG))

    def _collect(self, bucket: Bucket) -> None:
        """Bring into the bucket the gradients that autograd put elsewhere (after ``zero_grad()``, say).

        Here and not in every hook, because one call that copies many costs far less than many calls.
        """
        sources: list[torch.Tensor] = []
        views: list[torch.Tensor] = []
        for index, view in zip(bucket.members, bucket.views, strict=True):
            parameter = self._parameters[index]
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                self._absent(index, view)
                continue
            if gradient.layout is not torch.strided:
                raise UsageError(
                    f"the gradient of {self._names[index]!r} on rank {self._group.rank} is sparse; only "
                    "dense ones can be reduced (torch.nn.Embedding has sparse=False)"
                )
            sources.append(gradient)
            views.append(view)
            parameter.grad = view
        if sources:
            with torch.no_grad():  # backward(create_graph=True) runs hooks with gradients enabled
                torch._foreach_copy_(views, sources)

    def _absent(self, index: int, view: torch.Tensor) -> None:
        if len(self._futures) < self._readiness.ready:
            raise UsageError(
                f"the gradient of {self._names[index]!r} on rank {self._group.rank} was taken away before it "
                "could be reduced: a hook that applies gradients during backward cannot be used here"
            )
        view.zero_()  # the pass is incomplete, and every rank will raise

    def _finish(self, *, interrupted: bool = False) -> None:
        """Wait for all buckets; with an incomplete pass on any rank raise, on every rank."""
        readiness = self._readiness
        try:
            if readiness.arrived == 0 and not interrupted:
                return  # only the gradients of inputs were asked for
            if readiness.ready < len(self._set.buckets):
                self._set.vote.fill_(1)
                self._launch(len(self._set.buckets))
            for future in self._futures:
                future.wait()
            self.passes += 1
            if self._set.vote.item() != 0:
                self._set.vote.zero_()
                self._explain(interrupted)
            elif not self._order_is_known:
                self._adopt_order()
        finally:
            self._futures.clear()
            self._finish_is_queued = False
            readiness.close()

    def _explain(self, interrupted: bool) -> None:
        """Tell one another which gradients are missing, and raise unless every rank was interrupted."""
        count = len(self._parameters)
        own = torch.zeros(count + 1, dtype=torch.uint8)
        own[self._readiness.missing()] = 1
        own[count] = interrupted
        gathered = self._group.all_gather(own).wait()
        rows = [row.tolist() for row in gathered]
        if all(row[count] for row in rows):
            return
        raise UnusedParameterError(self._report(rows))

    def _report(self, rows: Sequence[Sequence[int]]) -> str:
        lines = []
        for rank, row in enumerate(rows):
            missing = [index for index in range(len(self._names)) if row[index]]
            if row[-1]:
                lines.append(f"rank {rank}: an exception ended backward before {self._listed(missing)}")
            elif missing:
                lines.append(f"rank {rank}: {self._listed(missing)}")
        return (
            f"backward ended without gradients for some parameters (seen by rank {self._group.rank}):\n  "
            + "\n  ".join(lines)
            + "\nTheir buckets can never be complete.  Use every parameter in the loss on every rank, or "
            "freeze those that are not used (requires_grad_(False)) before wrapping the model.  The "
            "gradients of this step are undefined; the group is still usable."
        )

    def _listed(self, indices: Sequence[int]) -> str:
        shown = ", ".join(
            repr(self._names[index])
            + ("" if self._parameters[index].requires_grad else " (frozen after wrapping)")
            for index in indices[:20]
        )
        return shown + (f" and {len(indices) - 20} more" if len(indices) > 20 else "")

    def _adopt_order(self) -> None:
        """Make the buckets anew, in the order in which rank 0's gradients arrived in this pass."""
        order = torch.tensor(self._readiness.arrival(), dtype=torch.int64)
        self._group.broadcast(order, root=0).wait()
        old = self._set
        new = build_buckets(self._group, self._parameters, order.tolist(), self._cap)
        self._order_is_known = True
        if new.members() == old.members():
            return
        with torch.no_grad():
            torch._foreach_copy_(list(new.views), list(old.views))
        for parameter, before, after in zip(self._parameters, old.views, new.views, strict=True):
            if parameter.grad is before:
                parameter.grad = after
        self._set = new
        self._readiness.rebuild(new.members())


# Hooks do not keep the reducer alive: garbage collection does not see what tensors and autograd's graph hold.


def _output_hook(reducer: Reducer) -> Callable[[torch.Tensor], None]:
    owner = weakref.ref(reducer)

    def pass_begins(_: torch.Tensor) -> None:
        if (alive := owner()) is not None:
            alive._enter()

    return pass_begins


def _gradient_hook(reducer: Reducer, index: int) -> Callable[[torch.Tensor], None]:
    mark = reducer._readiness.mark
    owner = weakref.ref(reducer)

    def gradient_is_ready(_: torch.Tensor) -> None:
        if (result := mark(index)) != _NOTHING and (alive := owner()) is not None:
            alive._attend(index, result)

    return gradient_is_ready


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
