"""The gradient reducer, which averages the gradients of one model over a group during backward.

A hook on every parameter notifies the reducer when its gradient has arrived.  With the last gradient of a
bucket the all-reduce of the bucket starts, and runs while autograd continues.  A callback at the end of the
backward pass waits for all buckets.  Buckets are always sent in the order of their index, so that all ranks
issue the same operations in whichever order gradients arrive.

``cpp/ddp/pass.h`` decides when buckets are sent and whether a pass succeeded.  It calls the reducer to
move gradients, send buckets and wait for them.

A backward pass is reduced if it passes through the output of a forward pass marked with
:meth:`Reducer.expect`: hooks on the output open the pass.  If the output contains tensors inside objects of
unknown classes, the first gradient opens the pass.

The buckets are first built in the reverse order of registration, and once more, on all ranks, in the order in
which gradients arrived on one rank in the first pass (as in NVIDIA's Apex; see also pytorch#17757).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from ...common.uncompiled import uncompiled
from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ...spec import AVG, MAX
from ..core import OUTCOME, Mark, Pass, PassEnd
from ..hooks.bucket import CommHook, GradBucket
from ..hooks.calling import HookedReduction
from .arrivals import OutputHook, output_hook, quiet_hook, watch_gradients
from .buckets import Bucket, alias_bucket
from .gradients import Gradients, ReducerOptions
from .outcome import OutcomeExchange
from .participants import Participants
from .report import explain, unexpected
from .sparse_gradients import SparseReduction
from .usage import Graph, outputs_with_graph, reachable


@uncompiled
class Reducer:
    """Averages the gradients of ``parameters`` over ``group``.

    Args:
        names: names of the parameters, for error messages.
        copies: for every copy of the model in this process the parameters that require gradients, in the same
            order on every rank and in every copy.  Gradients of all copies are summed into those of the
            first.  Some copies may have no gradients in a pass.
        options: equal on all ranks.

    Attributes:
        after_pass: functions called after every successful pass.
        waited: total time that passes have waited for other ranks at their end, in seconds.
    """

    def __init__(
        self,
        group: ProcessGroup,
        names: Sequence[str],
        copies: Sequence[Sequence[torch.Tensor]],
        options: ReducerOptions,
    ) -> None:
        self._group = group
        self._names = tuple(names)
        self._copies = tuple(tuple(copy) for copy in copies)
        self._parameters = self._copies[0]
        self._options = options
        self._tolerant = options.find_unused and not options.static_graph
        self._hook: tuple[CommHook, Any] | None = None
        #: The arguments for communication hooks, by members; the same objects until buckets are rebuilt.
        self._hook_buckets: dict[tuple[int, ...], GradBucket] = {}
        count = len(self._parameters)
        self._index_of = {
            id(parameter): index for copy in self._copies for index, parameter in enumerate(copy)
        }
        trained = self._copies[1:] if options.masters else self._copies
        #: Number of copies that have gradients if all take part.
        self._width = len(trained)
        #: Autograd's id of the backward pass without reduction after which to sum the copies' gradients.
        self._local_pass: int | None = None
        self._gradients = Gradients(group, self._names, self._copies, options)
        self._gradients.arrange(range(count - 1, -1, -1))
        self._pass = Pass(
            self._gradients.set.members(),
            [self._width] * count,
            find_unused=self._tolerant,
            learn=options.static_graph,
            fill_all=self._gradients.several or options.skip_unused,
            copies=self._width,
        )
        self._outcome = OutcomeExchange(group, self._pass, count)
        self._use_tail()
        self._gradients.count_references()
        #: A weak reference to the callback at the end of backward, which autograd deletes on an exception.
        self._end_of_pass: Callable[[], Callable[[], None] | None] = lambda: None
        #: A graph in which every parameter may be reachable.
        self._whole = Graph(range(count))
        #: The graphs of live outputs of forward passes that had no backward pass yet.
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._forget_pass()
        self.after_pass: list[Callable[[], None]] = []
        self.waited = 0.0
        self._replace_ended()
        self._hooks = watch_gradients(self, self._pass, self._gradients, trained)
        with _living_lock:
            _living.add(self)

    def _replace_ended(self) -> None:
        """Remove the hooks of reducers whose groups are no longer open from these parameters.

        A program that continues in another group may still reference the previous wrapper of the model, as
        may the traceback of the error that broke the previous group.
        """
        with _living_lock:  # copying a set while another thread adds to it raises RuntimeError
            living = list(_living)
        for other in living:
            if other._group.state != "open" and not self._index_of.keys().isdisjoint(other._index_of):
                other._hooks.remove()

    def _forget_pass(self) -> None:
        """Reset the state of the pass that references tensors and futures."""
        #: The graphs that backward has entered.
        self._entered: list[Graph] = []
        #: Whether each parameter had a gradient before any bucket was sent; hooks may change that later.
        self._present = [False] * len(self._parameters)
        #: Futures of the parameters reachable on any rank, one for each forward pass.
        self._reaches: list[Future[torch.Tensor]] = []
        self._participants = Participants()
        #: Whether this pass has already checked for references to gradients of earlier passes.
        self._references_kept = False
        #: The started reductions, by bucket.
        self._sent: dict[int, Future[Any] | HookedReduction | SparseReduction] = {}

    def _use_tail(self) -> None:
        plain = self._hook is None and not self._options.sparse
        self._outcome.use_tail(self._gradients.set.tail, allowed=plain)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they are reduced."""
        return self._gradients.set.buckets

    @property
    def passes(self) -> int:
        """Number of reduced passes; equal on all ranks."""
        return self._pass.number

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Average the buckets with ``hook(state, bucket)`` from now on.

        Raises UsageError if a hook is already set, or backward has begun.
        """
        if self._hook is not None:
            raise UsageError(
                f"a communication hook is registered already on rank {self._group.rank}: {self._hook[0]!r}; "
                "write one that does both, or wrap the module again"
            )
        if self._pass.opened:
            raise UsageError("a communication hook cannot be registered while backward runs")
        self._hook = (hook, state)
        self._use_tail()

    # -- another group ---------------------------------------------------------------------------

    def check_regroup(self) -> None:
        """Raise UsageError if :meth:`over` is not possible because the communication hook has a state."""
        if self._hook is not None and self._hook[1] is not None:
            raise UsageError(
                f"this model cannot move to another group: the state of its communication hook, a "
                f"{type(self._hook[1]).__name__}, belongs to the previous group and may differ between the "
                "surviving ranks; use a hook with the state None"
            )

    def over(self, group: ProcessGroup) -> Reducer:
        """Replace this reducer by an equal one over ``group``, and return that.  Gradients are kept.

        If it raises OutOfSharedMemory, because the buckets do not fit, this reducer stays in use.
        """
        successor = Reducer(group, self._names, self._copies, self._options)
        if self._hook is not None:
            successor.set_hook(self._hook[1], self._hook[0])
        successor.after_pass = self.after_pass
        self._hooks.remove()
        self._gradients.release()
        self._forget_pass()
        return successor

    # -- called around a forward pass ------------------------------------------------------------

    def in_backward(self) -> bool:
        """Whether a backward pass with reduction is running (checkpointing runs forward inside)."""
        return self._pass.opened and torch._C._current_graph_task_id() != -1

    def end_interrupted(self) -> None:
        """Finish, together with the other ranks, a pass that an exception interrupted on this rank.

        The others raise UnusedParameterError, unless they were interrupted too.  Gradients in the buckets are
        dropped: even if they were set to zero since, pending reductions may have overwritten them.
        """
        if self._local_pass is not None:
            self._local_pass = None
            self._gradients.drop_copies()
        if self._pass.opened:
            self._abandon()

    def _abandon(self) -> None:
        self._finish(interrupted=True)
        self._gradients.drop()

    def expect(
        self,
        output: Any,
        *,
        counts: bool = True,
        participants: Participants | None = None,
        copies: int | None = None,
    ) -> None:
        """Reduce the backward pass through ``output``.

        Args:
            counts: whether every rank runs this forward pass.
            participants: the ranks that run it, in a Join; None: all.
            copies: number of copies of the model that took part; None: all.
        """
        self._pass.expect(counts, copies or self._width)
        self._participants = participants or Participants()
        graph = self._follow(output, output_hook)
        if self._options.skip_unused:
            self._tell_reach(graph.reached)

    def ignore(self, output: Any) -> None:
        """Do not reduce a backward pass through ``output`` alone."""
        self._pass.ignore()
        if self._tolerant:
            self._follow(output, quiet_hook)  # it may be part of a backward pass that is reduced

    def _follow(self, output: Any, hook: Callable[[Reducer, Graph], OutputHook]) -> Graph:
        """Register ``hook`` on the tensors of ``output``; it keeps their :class:`Graph` alive."""
        outputs = list(outputs_with_graph(output))
        graph = self._whole
        if self._tolerant and outputs:
            graph = Graph(reachable(outputs, self._index_of))
            self._graphs.add(graph)
        called = hook(self, graph)
        self._hooks.come_last()
        for tensor in outputs:
            tensor.register_hook(called)  # type: ignore[no-untyped-call]
        self._hooks.registered(len(outputs))
        return graph

    def shadow(self, participants: Participants) -> None:
        """Take part in a pass of the other ranks with zero gradients.

        This rank's parameters get the averages too: it may own some of them (ZeroRedundancyOptimizer).
        """
        self._participants = participants
        if self._options.skip_unused:
            self._tell_reach(())
        self._gradients.drop_copies()
        for parameter in self._parameters:
            parameter.grad = None
        self._pass.open()
        self._begin(())
        self._finish(shadow=True)

    def _tell_reach(self, reached: Collection[int]) -> None:
        reach = [
            index in reached or bool(self._gradients.present(index)) for index in range(len(self._parameters))
        ]
        self._reaches.append(
            self._group.all_reduce(torch.tensor(reach, dtype=torch.uint8, device="cpu"), op=MAX)
        )

    # -- called by autograd ----------------------------------------------------------------------

    def enter(self, graph: Graph) -> None:
        """Open a pass before its first gradient, or continue it in another graph."""
        if self._pass.opened and self._end_of_pass() is None:
            self._abandon()  # the previous pass was interrupted, and no forward pass has finished it since
        self._entered.append(graph)
        if not self._pass.opened:
            self.keep_references()
            self._hooks.come_last()
            self._pass.open()
            self._queue_finish()

    def keep_references(self) -> None:
        """Preserve gradients of earlier passes that the program references; once in each pass."""
        if self._references_kept:
            return
        self._references_kept = True
        if renewed := self._gradients.keep_references():
            self._hook_buckets = {}
            self._use_tail()
            self._gradients.count_references(renewed)

    def _unreached(self) -> list[int]:
        """Return the parameters not reachable in any graph that backward entered or may still enter."""
        if not (self._tolerant and self._entered):
            return []
        reached = set().union(*(graph.reached for graph in (*self._graphs, *self._entered)))
        return [index for index in range(len(self._parameters)) if index not in reached]

    def _queue_finish(self) -> None:
        # A callback runs at the end of the graph task in which it was queued.  Reentrant checkpoints have
        # their own tasks; the hook on the output queues it in the outermost one.
        if self._end_of_pass() is None:
            end = partial(self._finish)
            self._end_of_pass = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def on_gradient(self, index: int, mark: Mark) -> None:
        """The gradient of parameter ``index`` has arrived, and there is something to do."""
        if mark is Mark.UNEXPECTED:
            where = f"the gradient of {self._names[index]!r} on rank {self._group.rank}"
            raise UsageError(unexpected(where, static=self._options.static_graph, tolerant=self._tolerant))
        self._queue_finish()  # if no output hook has done it
        if self._pass.arrived == 1:
            self._begin(self._unreached())
        self._pass.launch(self)

    def _begin(self, unreached: Sequence[int]) -> None:
        self.keep_references()
        if self._pass.separate:
            self._present = [bool(self._gradients.present(index)) for index in range(len(self._parameters))]
        self._pass.begin(self, unreached)

    def fold_later(self) -> None:
        """At the end of a pass without reduction, sum the gradients into those of the first copy."""
        current = torch._C._current_graph_task_id()
        if self._local_pass != current:
            self._local_pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._fold)

    def _fold(self) -> None:
        self._local_pass = None
        self._gradients.fold()

    # -- called by the pass ------------------------------------------------------------------------

    def fill(self, number: int) -> bool:
        """Complete the gradients in a bucket before it is sent; return False if no rank has any of them."""
        if number == OUTCOME:
            self._outcome.write_tail()
            return True
        bucket = self.buckets[number]
        if self._reaches and not self._is_needed(bucket):
            return False
        if not bucket.sparse:
            if self._gradients.several:
                self._gradients.add_up(bucket)
            elif self._pass.gaps:
                self._gradients.fill_gaps(bucket, self._pass.counts())
        return True

    def send(self, number: int) -> None:
        """Start the reduction of a bucket, or the exchange of the outcome."""
        if number == OUTCOME:
            self._outcome.send_flags(self._present)
            for sent in self._sent.values():
                if isinstance(sent, SparseReduction):
                    sent.start()
            return
        bucket = self.buckets[number]
        if bucket.sparse:
            (index,) = bucket.members
            own = self._gradients.sparse(index)
            like = self._parameters[index]
            dimensions = self._options.sparse[index]
            self._sent[number] = SparseReduction(self._group, own, like, dimensions, bucket.flat.dtype)
        elif self._hook is None:
            self._sent[number] = self._group.all_reduce(bucket.flat, op=AVG)
        else:
            self._sent[number] = HookedReduction(*self._hook, self._seen_by_hooks()[bucket.members])

    def wait(self, number: int) -> None:
        """Wait for the reduction of a bucket, or for the outcome.

        On a device only the current streams wait for the reduction, not the host.
        """
        if number == OUTCOME:
            self._outcome.wait()
            return
        sent = self._sent[number]
        if isinstance(sent, SparseReduction):
            return  # deliver() waits, if the pass succeeded
        sent.wait(blocking=False)
        scale = self._participants.scale
        if scale != 1.0:
            self.buckets[number].body.mul_(scale)

    def deliver(self, used: Sequence[bool]) -> None:
        """Set the gradients of the parameters to the averages."""
        for number, sent in self._sent.items():
            (index, *_) = self.buckets[number].members
            if isinstance(sent, SparseReduction) and used[index]:
                self._gradients.deliver_sparse(index, sent.wait().mul_(self._participants.scale))
        self._gradients.deliver(used, gaps=self._pass.gaps)

    def _is_needed(self, bucket: Bucket) -> bool:
        """Whether any rank may have a gradient in ``bucket``."""
        members = list(bucket.members)
        return any(bool(reach.wait()[members].any()) for reach in self._reaches)

    def _seen_by_hooks(self) -> dict[tuple[int, ...], GradBucket]:
        if not self._hook_buckets:
            dense = [bucket for bucket in self.buckets if not bucket.sparse]
            self._hook_buckets = {
                bucket.members: GradBucket(
                    self._group,
                    number,
                    number == len(dense) - 1,
                    bucket.body,
                    bucket.views,
                    [self._parameters[index] for index in bucket.members],
                    bucket.members,
                )
                for number, bucket in enumerate(map(alias_bucket, dense))
            }
        return self._hook_buckets

    # -- the end of a pass -----------------------------------------------------------------------

    def _finish(self, *, interrupted: bool = False, shadow: bool = False) -> None:
        """Wait for all buckets; raise unless the pass succeeded on every rank."""
        self._end_of_pass = lambda: None
        end = None
        try:
            began = time.monotonic()
            end = self._pass.finish(self, interrupted, shadow)
            self.waited += time.monotonic() - began
            if end is PassEnd.NOTHING:  # only gradients of inputs were computed; the pass may still come
                self._entered = []
                self._references_kept = False
                return
            if end is not PassEnd.WELL:
                self._explain(interrupted)
                return
            self._adopt_order()
            for fn in self.after_pass:
                fn()
        finally:
            if end is not PassEnd.NOTHING:
                self._graphs.difference_update(self._entered)
                self._gradients.drop_copies()
                self._forget_pass()
                self._pass.close()

    def _explain(self, interrupted: bool) -> None:
        named = [
            repr(name) + ("" if parameter.requires_grad else " (frozen after wrapping)")
            for name, parameter in zip(self._names, self._parameters, strict=True)
        ]
        explain(self._group, named, self._pass.missing(), interrupted, self._pass.extra)

    def _adopt_order(self) -> None:
        """After the first successful pass, rebuild the buckets in one rank's order of arrival.

        A rank without a batch in this pass also receives the number of arrivals of each gradient.
        """
        order = self._pass.take_order()
        if order is None:
            return
        count = len(order)
        shown = torch.tensor([*order, *self._pass.expected, self._width], dtype=torch.int64, device="cpu")
        own = self._pass.arrived > 0
        self._group.broadcast(shown, root=self._participants.first).wait()
        *numbers, width = shown.tolist()
        expected = self._pass.expected if own else [-(-n * self._width // width) for n in numbers[count:]]
        self._gradients.arrange(numbers[:count])
        self._hook_buckets = {}
        self._pass.rebuild(self._gradients.set.members(), expected)
        self._use_tail()
        self._gradients.count_references()


_living: weakref.WeakSet[Reducer] = weakref.WeakSet()
_living_lock = threading.Lock()
