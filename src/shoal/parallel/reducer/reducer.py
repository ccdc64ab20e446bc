"""The gradient reducer: averages the gradients of one model over a group while backward still runs.

A hook on every parameter tells when its gradient is there; when the last one of a bucket has come, the
bucket's all-reduce starts, and the engine moves bytes while autograd goes on.  A callback at the end of
the backward pass waits for all of them.  Buckets are always sent in the order of their index, so that
all ranks issue the same operations whatever order their gradients arrive in.

A backward pass is reduced when it comes through the output of a forward pass that asked for it
(:meth:`Reducer.expect`): hooks on the output open the pass.  Outputs that hold tensors where we do not
find them (objects of unknown classes) open it with the first gradient that arrives.

Ranks may disagree about which parameters the loss used.  A rank that misses some at the end of its pass
sends the incomplete buckets nevertheless; ``outcome.py`` says how the ranks learn of it.

The order in which gradients arrived in the first pass replaces the reverse order of registration, once:
one rank's order, on all ranks.  (Dynamic discovery of the order is from NVIDIA's Apex; see also
pytorch#17757.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ...spec import AVG, MAX
from ..core import Readiness
from ..hooks.bucket import CommHook, GradBucket
from ..hooks.calling import HookedReduction
from .arrivals import UNEXPECTED, OutputHook, output_hook, quiet_hook, watch_gradients
from .buckets import Bucket
from .gradients import Gradients, ReducerOptions
from .outcome import Flags, Tail
from .participants import Participants
from .report import explain
from .sparse_gradients import SparseReduction
from .usage import Graph, outputs_with_graph, reachable


@dataclass(slots=True)
class _Pass:
    """What is known of the pass that comes or runs.

    Attributes:
        forwards: forward passes since the last reduction.
        entered: the graphs that backward went into.
        copies: how many copies of the model took part in them.
        reaches: what was reachable on any rank, one for each forward pass.
        participants: the ranks that give gradients; asked for when everything is sent.
        gaps: some gradients may not come, so buckets are looked through before they are sent.
        sent: one for each bucket whose reduction was started; None for one that nobody needs.
    """

    forwards: int = 0
    entered: list[Graph] = field(default_factory=list)
    copies: int = 0
    reaches: list[Future[torch.Tensor]] = field(default_factory=list)
    participants: Participants = field(default_factory=Participants)
    gaps: bool = False
    sent: list[Future[Any] | HookedReduction | SparseReduction | None] = field(default_factory=list)


class Reducer:
    """Averages the gradients of ``parameters`` over ``group``.

    Args:
        names: what error messages call the parameters.
        copies: for every copy of the model in this process the parameters that require gradients, in the same
            order on every rank and in every copy.  Gradients of the copies are added up into those of the
            first.  In a pass some copies may have none.
        options: equal on all ranks.

    Attributes:
        passes: how many were reduced; equal on all ranks.
        after_pass: called after every pass that went well.
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
        self._learning = options.static_graph
        self._hook: tuple[CommHook, Any] | None = None
        self._given: dict[tuple[int, ...], GradBucket] = {}
        count = len(self._parameters)
        self._index_of = {
            id(parameter): index for copy in self._copies for index, parameter in enumerate(copy)
        }
        trained = self._copies[1:] if options.masters else self._copies
        #: How many copies have gradients if all take part.
        self._width = len(trained)
        #: How often each gradient arrives in a pass.
        self._expected = [self._width] * count
        #: The backward pass without reduction, by autograd's number, after which copies are to be added up.
        self._local_pass: int | None = None
        #: Which parameters have a gradient on any rank, where passes do not differ in that.
        self._used = [True] * count
        self._flags = Flags(group, count)
        self._gradients = Gradients(group, self._names, self._copies, options)
        self._gradients.arrange(range(count - 1, -1, -1))
        self._readiness = Readiness(self._gradients.set.members(), self._expected)
        if self._learning:
            self._readiness.learn()
        self._order_is_known = False
        self._finish_is_queued = False
        self._pass = _Pass()
        #: What leads to every parameter, or is not known.
        self._whole = Graph(range(count))
        #: Of forward passes whose outputs live and did not go backward yet.
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.passes = 0
        self.after_pass: list[Callable[[], None]] = []
        self._hooks = watch_gradients(self, self._readiness, self._gradients, trained)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they are reduced."""
        return self._gradients.set.buckets

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` average the buckets from now on.

        Raises:
            UsageError: one was set before, or backward has begun.
        """
        if self._hook is not None:
            raise UsageError(
                f"a communication hook is registered already on rank {self._group.rank}: {self._hook[0]!r}; "
                "write one that does both, or wrap the module again"
            )
        if self._readiness.opened:
            raise UsageError("a communication hook cannot be registered while backward runs")
        self._hook = (hook, state)

    # -- called around a forward pass ------------------------------------------------------------

    def in_backward(self) -> bool:
        """Whether a backward pass is running that is being reduced (checkpointing runs forward inside)."""
        return self._readiness.opened and torch._C._current_graph_task_id() != -1

    def settle(self) -> None:
        """Bring a pass to its end that an exception interrupted on this rank, together with the other ranks.

        Those raise UnusedParameterError then, unless they were interrupted, too.  Gradients in the buckets
        are dropped: if they were set to zero meanwhile, what was on its way has come since.
        """
        if self._local_pass is not None:
            self._local_pass = None
            self._gradients.drop_copies()
        if self._readiness.opened:
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
        """Reduce the backward pass that comes through ``output``.

        Args:
            counts: every rank runs this forward pass.
            participants: a rank that runs it, and what to multiply averages with; only within a Join.
            copies: how many copies of the model took part, if not all.
        """
        now = self._pass
        now.forwards += counts
        now.copies = max(now.copies, copies or self._width)
        now.participants = participants or Participants()
        self._readiness.arm()
        graph = self._follow(output, output_hook)
        if self._options.skip_unused:
            self._tell_reach(graph.reached)

    def ignore(self, output: Any) -> None:
        """Do not reduce the backward pass that comes through ``output`` alone."""
        self._readiness.disarm()
        if self._tolerant:
            self._follow(output, quiet_hook)  # it may come together with one that is reduced

    def _follow(self, output: Any, hook: Callable[[Reducer, Graph], OutputHook]) -> Graph:
        """Put a hook on the tensors of ``output``; it keeps what is known of their graph while they live."""
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
        """Take part in a pass of the other ranks with gradients of zero.  Its parameters get the averages
        too, because this rank may own some of them (ZeroRedundancyOptimizer).

        Args:
            participants: as for :meth:`expect`.
        """
        self._pass.participants = participants
        if self._options.skip_unused:
            self._tell_reach(())
        self._gradients.drop_copies()
        for parameter in self._parameters:
            parameter.grad = None
        self._readiness.open()
        self._begin()
        self._finish(shadow=True)

    def _tell_reach(self, reached: Collection[int]) -> None:
        reach = [
            index in reached or bool(self._gradients.present(index)) for index in range(len(self._parameters))
        ]
        self._pass.reaches.append(self._group.all_reduce(torch.tensor(reach, dtype=torch.uint8), op=MAX))

    # -- called by autograd ----------------------------------------------------------------------

    def enter(self, graph: Graph) -> None:
        """A pass begins, before the first gradient, or goes on to another graph."""
        self._pass.entered.append(graph)
        if not self._readiness.opened:
            self._hooks.come_last()
            self._readiness.open()
            self._queue_finish()

    def _begin(self) -> None:
        """A pass has its first gradient: it is none that asks for the gradients of inputs only."""
        now = self._pass
        now.gaps = 0 in self._expected
        if now.forwards > 1 and not self._separate():
            Tail(self._gradients.set.tail).say(False, now.forwards - 1)
        if self._tolerant and now.entered:
            reached = set().union(*(graph.reached for graph in (*self._graphs, *now.entered)))
            if len(reached) < len(self._parameters):
                now.gaps = True
                self._readiness.skip([i for i in range(len(self._parameters)) if i not in reached])

    def _queue_finish(self) -> None:
        # A callback runs at the end of the graph task in which it was queued.  Reentrant checkpoints have
        # tasks of their own; the hook on the output queues it in the outermost one.
        if not self._finish_is_queued:
            self._finish_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def on_gradient(self, index: int, mark: int) -> None:
        """Something is to do after the gradient of parameter ``index`` arrived."""
        if mark == UNEXPECTED:
            raise UsageError(self._unexpected(index))
        self._queue_finish()  # if the pass came through no output that we know
        if self._readiness.arrived == 1:
            self._begin()
        self._launch(self._readiness.ready)

    def fold_later(self) -> None:
        """A pass that is not reduced must leave its gradients where the optimiser looks for them."""
        current = torch._C._current_graph_task_id()
        if self._local_pass != current:
            self._local_pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._fold)

    def _fold(self) -> None:
        self._local_pass = None
        self._gradients.fold()

    def _unexpected(self, index: int) -> str:
        where = f"the gradient of {self._names[index]!r} on rank {self._group.rank}"
        if self._options.static_graph:
            return (
                f"{where} arrived more often than in the first backward pass, but static_graph=True promises "
                "that every pass is alike; leave that option out"
            )
        advice = "use torch.utils.checkpoint with use_reentrant=False, or static_graph=True"
        if self._tolerant:
            return (
                f"{where} arrived twice, or although no output of the forward pass depends on it: it is used "
                f"outside of forward, or in a reentrant checkpoint, which hides what it uses; {advice}"
            )
        return (
            f"{where} arrived twice in one backward pass, because the parameter is used in several reentrant "
            f"checkpoints; {advice}"
        )

    # -- sending ---------------------------------------------------------------------------------

    def _launch(self, end: int) -> None:
        """Start the reduction of all buckets with an index below ``end`` that were not started yet."""
        sent = self._pass.sent
        while len(sent) < end:
            sent.append(self._send(self._gradients.set.buckets[len(sent)]))

    def _send(self, bucket: Bucket) -> Future[Any] | HookedReduction | SparseReduction | None:
        if self._pass.reaches and not self._is_needed(bucket):
            return None
        if bucket.sparse:
            (index,) = bucket.members
            own = self._gradients.sparse(index)
            like = self._parameters[index]
            return SparseReduction(self._group, own, like, self._options.sparse[index], bucket.flat.dtype)
        if self._gradients.several:
            self._gradients.add_up(bucket)
        elif self._pass.gaps:
            self._gradients.fill_gaps(bucket, self._readiness.counts())
        if self._hook is None:
            return self._group.all_reduce(bucket.flat, op=AVG)
        return HookedReduction(*self._hook, self._given_to_hooks()[bucket.members])

    def _is_needed(self, bucket: Bucket) -> bool:
        """Whether any rank may have a gradient in it."""
        members = list(bucket.members)
        return any(bool(reach.wait()[members].any()) for reach in self._pass.reaches)

    def _given_to_hooks(self) -> dict[tuple[int, ...], GradBucket]:
        """The buckets as hooks see them, by their members; the same objects until buckets are made anew."""
        if not self._given:
            dense = [bucket for bucket in self._gradients.set.buckets if not bucket.sparse]
            self._given = {
                bucket.members: GradBucket(
                    self._group,
                    number,
                    bucket is dense[-1],
                    bucket.body,
                    bucket.views,
                    [self._parameters[index] for index in bucket.members],
                    bucket.members,
                )
                for number, bucket in enumerate(dense)
            }
        return self._given

    # -- the end of a pass -----------------------------------------------------------------------

    def _finish(self, *, interrupted: bool = False, shadow: bool = False) -> None:
        """Wait for all buckets; unless the pass went well on every rank, raise."""
        self._finish_is_queued = False
        if self._readiness.arrived == 0 and not (interrupted or shadow):
            # Only the gradients of inputs were asked for; the pass that was expected may come yet.
            self._pass.entered = []
            self._readiness.close()
            return
        try:
            well, used = self._complete(interrupted, shadow)
            self.passes += 1
            if not well:
                self._explain(interrupted)
                return
            self._deliver(used)
            self._learn(used)
            for fn in self.after_pass:
                fn()
        finally:
            self._graphs.difference_update(self._pass.entered)
            self._gradients.drop_copies()
            self._pass = _Pass()
            self._readiness.close()

    def _separate(self) -> bool:
        """Whether the outcome takes a message of its own."""
        return bool(
            self._tolerant
            or self._learning
            or self._hook is not None
            or self._options.sparse
            or not self._gradients.set.tail.numel()
        )

    def _complete(self, interrupted: bool, shadow: bool) -> tuple[bool, list[bool]]:
        """Send what was not sent and wait for all; whether all went well, and what was used anywhere."""
        now = self._pass
        separate = self._separate()
        extra = max(now.forwards - 1, 0)
        trouble = interrupted
        if self._learning or self._readiness.ready < len(self._gradients.set.buckets):
            now.gaps = True
            lacking = not (shadow or self._learning or self._tolerant) and bool(self._missing())
            trouble = interrupted or lacking
            if trouble and not separate:
                Tail(self._gradients.set.tail).say(True, extra)
        self._launch(len(self._gradients.set.buckets))
        if separate:
            counts = self._readiness.counts()
            used = [counts[i] > 0 or bool(self._gradients.present(i)) for i in range(len(counts))]
            self._flags.say(trouble, extra, used)
        for sent in now.sent:
            if isinstance(sent, SparseReduction):
                sent.start()
        scale = now.participants.scale
        for bucket, sent in zip(self._gradients.set.buckets, now.sent, strict=True):
            if sent is not None and not bucket.sparse:
                sent.wait()
                if scale != 1.0:
                    bucket.body.mul_(scale)
        if separate:
            return self._flags.hear()
        return Tail(self._gradients.set.tail).well(), self._used

    def _missing(self) -> list[int]:
        """Parameters whose gradients did not come."""
        missing = self._readiness.missing()
        if self._width > 1:  # a small batch occupies some of the copies, the others have nothing to add
            counts = self._readiness.counts()
            missing = [index for index in missing if counts[index] == 0]
        return missing

    def _explain(self, interrupted: bool) -> None:
        extra = max(self._pass.forwards - 1, 0)
        named = [
            repr(name) + ("" if parameter.requires_grad else " (frozen after wrapping)")
            for name, parameter in zip(self._names, self._parameters, strict=True)
        ]
        explain(self._group, named, self._missing(), interrupted, extra)

    def _deliver(self, used: Sequence[bool]) -> None:
        now = self._pass
        for bucket, sent in zip(self._gradients.set.buckets, now.sent, strict=True):
            if isinstance(sent, SparseReduction) and used[bucket.members[0]]:
                self._gradients.deliver_sparse(bucket.members[0], sent.wait().mul_(now.participants.scale))
        self._gradients.deliver(used, gaps=now.gaps)

    # -- what the first pass shows ---------------------------------------------------------------

    def _learn(self, used: list[bool]) -> None:
        if self._order_is_known:
            return
        self._order_is_known = True
        if self._learning:
            self._learning = False
            part = self._pass.copies or self._width
            self._expected = [-(-count * self._width // part) for count in self._readiness.counts()]
            self._used = used
        count = len(self._parameters)
        order = self._readiness.arrival()
        arrived = set(order)
        order += [index for index in range(count - 1, -1, -1) if index not in arrived]
        chosen = torch.tensor(order, dtype=torch.int64)
        self._group.broadcast(chosen, root=self._pass.participants.first).wait()
        self._gradients.arrange(chosen.tolist())
        self._given = {}
        self._readiness.rebuild(self._gradients.set.members(), self._expected)
