"""The gradient reducer, which averages the gradients of one model over a group during backward.

A hook on every parameter notifies the reducer when its gradient has arrived.  With the last gradient of a
bucket the all-reduce of the bucket starts, and runs while autograd continues.  A callback at the end of the
backward pass waits for all buckets.  Buckets are always sent in the order of their index, so that all ranks
issue the same operations in whichever order gradients arrive.

``cpp/ddp/pass.h`` decides when buckets are sent and whether a pass succeeded.  It calls the reducer to
move gradients, send buckets and wait for them.

A backward pass is reduced if it passes through the output of a forward pass marked with
:meth:`Reducer.reduce_backward`: hooks on the output open the pass.  If the output contains tensors inside
objects of unknown classes, the first gradient opens the pass.

The buckets are first built in the reverse order of registration, and once more, on all ranks, in the order in
which gradients arrived on one rank in the first pass (as in NVIDIA's Apex; see also pytorch#17757).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...common.containers import tensors
from ...common.never_compile import never_compile
from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ...spec import AVG, MAX
from ...streams import has_streams
from ..core import OUTCOME, Mark, Pass, PassEnd, gradient_hook
from ..hooks.contract import CommHook, GradBucket, HookedReduction, wait_for
from .buckets import Bucket, alias_bucket
from .gradient_streams import GradientStreams
from .gradients import Gradients, ReducerOptions
from .outcome import OutcomeExchange, raise_pass_error, unexpected_gradient_message
from .sparse_gradients import SparseReduction

_live_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
_live_reducers_lock = threading.Lock()


class Graph:
    """The autograd graph of one forward pass; ``reached`` are the indices of parameters reachable in it."""

    __slots__ = ("__weakref__", "reached")

    def __init__(self, reached: Collection[int]) -> None:
        self.reached = reached


class Participants:
    """The ranks that run a forward pass and contribute gradients to its backward pass.

    Args:
        find: returns ``(first, scale)``, waiting for the other ranks.  Called once, at the first use of
            either.  None: all ranks take part.
    """

    __slots__ = ("_find", "_found")

    def __init__(self, find: Callable[[], tuple[int, float]] | None = None) -> None:
        self._find = find
        self._found = (0, 1.0)

    @property
    def first(self) -> int:
        """The lowest rank that takes part; the same on all ranks."""
        return self.resolve()[0]

    @property
    def scale(self) -> float:
        """The factor for averages over all ranks; not 1 if the mean must be over the participants only."""
        return self.resolve()[1]

    def resolve(self) -> tuple[int, float]:
        """Return ``(first, scale)``; the first call waits for the other ranks.

        Raises UsageError, on every rank that calls it, if the ranks treat a batch differently.
        """
        if self._find is not None:
            self._found = self._find()
            self._find = None
        return self._found


@never_compile
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
        self._find_unused = options.find_unused and not options.static_graph
        self._hook: tuple[CommHook, Any] | None = None
        #: The arguments for communication hooks, by members; the same objects until buckets are rebuilt.
        self._hook_buckets: dict[tuple[int, ...], GradBucket] = {}
        count = len(self._parameters)
        self._index_of = {
            id(parameter): index for copy in self._copies for index, parameter in enumerate(copy)
        }
        trained = self._copies[1:] if options.has_master_copy else self._copies
        #: Number of copies that have gradients if all take part.
        self._copy_count = len(trained)
        #: Autograd's id of the backward pass without reduction after which to sum the copies' gradients.
        self._local_pass: int | None = None
        self._gradients = Gradients(group, self._names, self._copies, options)
        self._gradients.arrange_buckets(range(count - 1, -1, -1))
        self._streams = GradientStreams()
        self._pass = Pass(
            self._gradients.set.members(),
            [self._copy_count] * count,
            find_unused=self._find_unused,
            learn=options.static_graph,
            fill_all=self._gradients.has_copies or options.skip_unused,
            copies=self._copy_count,
        )
        self._outcome = OutcomeExchange(group, self._pass, count)
        self._use_tail()
        self._gradients.count_references()
        #: A weak reference to the callback at the end of backward, which autograd deletes on an exception.
        self._end_of_pass: Callable[[], Callable[[], None] | None] = lambda: None
        #: A graph in which every parameter may be reachable.
        self._full_graph = Graph(range(count))
        #: The graphs of live outputs of forward passes that had no backward pass yet.
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._reset_pass()
        self.after_pass: list[Callable[[], None]] = []
        self.waited = 0.0
        self._detach_closed_reducers()
        self._hooks = register_gradient_hooks(self, self._pass, self._gradients, self._streams, trained)
        with _live_reducers_lock:
            _live_reducers.add(self)

    def _detach_closed_reducers(self) -> None:
        """Remove the hooks of reducers whose groups are no longer open from these parameters.

        The program, or the traceback of an error, may still reference a previous wrapper of the model.
        """
        with _live_reducers_lock:  # copying a set while another thread adds to it raises RuntimeError
            living = list(_live_reducers)
        for other in living:
            if other._group.state != "open" and not self._index_of.keys().isdisjoint(other._index_of):
                other._hooks.remove()

    def _reset_pass(self) -> None:
        """Reset the state of the pass that references tensors and futures."""
        #: The graphs that backward has entered.
        self._entered: list[Graph] = []
        #: Whether each parameter had a gradient before any bucket was sent; hooks may change that later.
        self._present = [False] * len(self._parameters)
        #: Futures of the parameters reachable on any rank, one for each forward pass.
        self._reachable: list[Future[torch.Tensor]] = []
        self._participants = Participants()
        #: Whether this pass has already checked for references to gradients of earlier passes.
        self._references_checked = False
        #: The started reductions, by bucket; those of sparse gradients, by parameter.
        self._sent: dict[int, Future[Any] | HookedReduction] = {}
        self._sent_sparse: dict[int, SparseReduction] = {}

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
        """Raise UsageError if the communication hook has a state, which rules out :meth:`rebuilt_for`."""
        if self._hook is not None and self._hook[1] is not None:
            raise UsageError(
                f"this model cannot move to another group: the state of its communication hook, a "
                f"{type(self._hook[1]).__name__}, belongs to the previous group and may differ between the "
                "surviving ranks; use a hook with the state None"
            )

    def rebuilt_for(self, group: ProcessGroup) -> Reducer:
        """Replace this reducer by an equal one over ``group``, and return that.  Gradients are kept.

        If it raises OutOfSharedMemory, because the buckets do not fit, this reducer stays in use.
        """
        successor = Reducer(group, self._names, self._copies, self._options)
        if self._hook is not None:
            successor.set_hook(self._hook[1], self._hook[0])
        successor.after_pass = self.after_pass
        self._hooks.remove()
        self._gradients.copy_out_all()
        self._reset_pass()
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
            self._gradients.clear_copies()
        if self._pass.opened:
            self._finish_interrupted()

    def _finish_interrupted(self) -> None:
        self._finish(interrupted=True)
        self._gradients.clear()

    def reduce_backward(
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
        self._pass.expect(counts, copies or self._copy_count)
        self._participants = participants or Participants()
        graph = self._register_output_hooks(output, reduced=True)
        if self._options.skip_unused:
            self._exchange_reachable(graph.reached)

    def skip_backward(self, output: Any) -> None:
        """Do not reduce a backward pass through ``output`` alone."""
        self._pass.ignore()
        if self._find_unused:
            # It may be part of a backward pass that is reduced.
            self._register_output_hooks(output, reduced=False)

    def _register_output_hooks(self, output: Any, *, reduced: bool) -> Graph:
        """Keep the :class:`Graph` of ``output`` alive as long as its tensors, and enter it in backward."""
        outputs = list(outputs_with_graph(output))
        graph = self._full_graph
        if self._find_unused and outputs:
            graph = Graph(reachable(outputs, self._index_of))
            self._graphs.add(graph)
        hook = partial(_enter, weakref.ref(self), graph) if reduced else partial(_do_nothing, graph)
        self._hooks.move_last()
        for tensor in outputs:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        self._hooks.note_registered(len(outputs))
        return graph

    def shadow(self, participants: Participants) -> None:
        """Take part in a pass of the other ranks with zero gradients.

        This rank's parameters get the averages too: it may own some of them (ZeroRedundancyOptimizer).
        """
        self._participants = participants
        if self._options.skip_unused:
            self._exchange_reachable(())
        self._gradients.clear_copies()
        for parameter in self._parameters:
            parameter.grad = None
        self._pass.open()
        self._begin(())
        self._finish(shadow=True)

    def _exchange_reachable(self, reached: Collection[int]) -> None:
        reach = [
            index in reached or bool(self._gradients.present(index)) for index in range(len(self._parameters))
        ]
        self._reachable.append(
            self._group.all_reduce(torch.tensor(reach, dtype=torch.uint8, device="cpu"), op=MAX)
        )

    # -- called by autograd ----------------------------------------------------------------------

    def enter(self, graph: Graph) -> None:
        """Open a pass before its first gradient, or continue it in another graph."""
        if self._pass.opened and self._end_of_pass() is None:
            self._finish_interrupted()  # no forward pass has finished the interrupted pass since
        self._entered.append(graph)
        if not self._pass.opened:
            self.preserve_referenced()
            self._hooks.move_last()
            self._pass.open()
            self._queue_finish()

    def preserve_referenced(self) -> None:
        """Preserve gradients of earlier passes that the program references; once in each pass."""
        if self._references_checked:
            return
        self._references_checked = True
        if renewed := self._gradients.preserve_referenced():
            self._hook_buckets = {}
            self._use_tail()
            self._gradients.count_references(renewed)

    def _unreached(self) -> list[int]:
        """Return the parameters not reachable in any graph that backward entered or may still enter."""
        if not (self._find_unused and self._entered):
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
            raise UsageError(
                unexpected_gradient_message(
                    where, static=self._options.static_graph, tolerant=self._find_unused
                )
            )
        self._queue_finish()  # if no output hook has done it
        if self._pass.arrived == 1:
            self._begin(self._unreached())
        self._pass.launch(self)

    def _begin(self, unreached: Sequence[int]) -> None:
        self.preserve_referenced()
        if self._pass.separate:
            self._present = [bool(self._gradients.present(index)) for index in range(len(self._parameters))]
        self._pass.begin(self, unreached)

    def sum_copies_later(self) -> None:
        """At the end of a pass without reduction, sum the gradients into those of the first copy."""
        current = torch._C._current_graph_task_id()
        if self._local_pass != current:
            self._local_pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._sum_copies)

    def _sum_copies(self) -> None:
        self._local_pass = None
        self._gradients.sum_copies()

    # -- called by the pass ------------------------------------------------------------------------

    def fill(self, number: int) -> bool:
        """Complete the gradients in a bucket before it is sent; return False if no rank has any of them."""
        if number == OUTCOME:
            self._outcome.write_tail()
            return True
        bucket = self.buckets[number]
        if self._reachable and not self._is_needed(bucket):
            return False
        if not bucket.sparse:
            if self._gradients.has_copies:
                self._streams.order()
                self._gradients.sum_into_bucket(bucket)
            elif self._pass.gaps:
                self._gradients.fill_gaps(bucket, self._pass.counts())
        return True

    def send(self, number: int) -> None:
        """Start the reduction of a bucket, or the exchange of the outcome."""
        if number == OUTCOME:
            self._outcome.send_flags(self._present)
            for sparse in self._sent_sparse.values():
                sparse.start()
            return
        self._streams.order()
        bucket = self.buckets[number]
        if bucket.sparse:
            (index,) = bucket.members
            self._sent_sparse[index] = SparseReduction(
                self._group,
                self._gradients.sparse(index),
                self._parameters[index],
                self._options.sparse[index],
                bucket.flat.dtype,
            )
        elif self._hook is None:
            self._sent[number] = self._group.all_reduce(bucket.flat, op=AVG)
        else:
            self._sent[number] = HookedReduction(*self._hook, self._grad_buckets()[bucket.members])

    def wait(self, number: int) -> None:
        """Wait for the reduction of a bucket, or for the outcome.

        On a device only the current streams wait for the reduction, not the host.
        """
        if number == OUTCOME:
            self._outcome.wait()
            return
        if self.buckets[number].sparse:
            return  # deliver() waits, if the pass succeeded
        wait_for(self._sent[number])
        scale = self._participants.scale
        if scale != 1.0:
            self.buckets[number].body.mul_(scale)

    def deliver(self, used: Sequence[bool]) -> None:
        """Set the gradients of the parameters to the averages."""
        for index, sparse in self._sent_sparse.items():
            if used[index]:
                gradient = sparse.wait().mul_(self._participants.scale)
                self._parameters[index].grad = gradient.to(self._parameters[index].dtype)
        self._gradients.deliver(used, gaps=self._pass.gaps)

    def _is_needed(self, bucket: Bucket) -> bool:
        """Whether any rank may have a gradient in ``bucket``."""
        members = list(bucket.members)
        return any(bool(reach.wait()[members].any()) for reach in self._reachable)

    def _grad_buckets(self) -> dict[tuple[int, ...], GradBucket]:
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
                self._references_checked = False
                return
            if end is not PassEnd.WELL:
                self._raise_failure(interrupted)
                return
            self._adopt_order()
            for fn in self.after_pass:
                fn()
        finally:
            if end is not PassEnd.NOTHING:
                self._graphs.difference_update(self._entered)
                self._gradients.clear_copies()
                self._streams.clear()
                self._reset_pass()
                self._pass.close()

    def _raise_failure(self, interrupted: bool) -> None:
        named = [
            repr(name) + ("" if parameter.requires_grad else " (frozen after wrapping)")
            for name, parameter in zip(self._names, self._parameters, strict=True)
        ]
        raise_pass_error(self._group, named, self._pass.missing(), interrupted, self._pass.extra)

    def _adopt_order(self) -> None:
        """After the first successful pass, rebuild the buckets in one rank's order of arrival.

        A rank without a batch in this pass also receives the number of arrivals of each gradient.
        """
        order = self._pass.take_order()
        if order is None:
            return
        count = len(order)
        shown = torch.tensor(
            [*order, *self._pass.expected, self._copy_count], dtype=torch.int64, device="cpu"
        )
        own = self._pass.arrived > 0
        self._group.broadcast(shown, root=self._participants.first).wait()
        *numbers, width = shown.tolist()
        expected = (
            self._pass.expected if own else [-(-n * self._copy_count // width) for n in numbers[count:]]
        )
        self._gradients.arrange_buckets(numbers[:count])
        self._hook_buckets = {}
        self._pass.rebuild(self._gradients.set.members(), expected)
        self._use_tail()
        self._gradients.count_references()


# -- hooks of autograd ---------------------------------------------------------------------------
#
# They hold only weak references to the reducer, because the garbage collector does not see references from
# tensors and from autograd's graph.


@never_compile
def _enter(owner: weakref.ref[Reducer], graph: Graph, _: torch.Tensor) -> None:
    if (alive := owner()) is not None:
        alive.enter(graph)


@never_compile
def _do_nothing(graph: Graph, _: torch.Tensor) -> None:
    pass


class ParameterHooks:
    """The hooks on the parameters, which must run last: sent gradients must not change."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles
        self._last_id = RemovableHandle.next_id

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def note_registered(self, count: int) -> None:
        """Note that the reducer registered ``count`` hooks on other tensors."""
        self._last_id += count

    def move_last(self) -> None:
        """Move behind hooks that were registered on the parameters since the last call."""
        if self._last_id == RemovableHandle.next_id:  # no hook was registered anywhere
            return
        self._last_id = RemovableHandle.next_id
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # autograd ignores move_to_end()


def register_gradient_hooks(
    reducer: Reducer,
    passes: Pass,
    gradients: Gradients,
    streams: GradientStreams,
    copies: Sequence[Sequence[torch.Tensor]],
) -> ParameterHooks:
    """Register hooks that notify ``reducer`` of every gradient of ``copies``, to which autograd writes."""
    lock = threading.Lock()
    put_in_place = _on_only_gradient(reducer, gradients)
    on_several_devices = len({parameter.device for copy in copies for parameter in copy}) > 1
    locked = gradients.has_copies or on_several_devices

    def hook(index: int, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        if gradients.has_copies:
            run = _copy_hook(reducer, passes, index, gradients.is_further(index, parameter))
        else:
            run = gradient_hook(
                passes,
                index,
                gradients.views,
                gradients.addresses,
                index not in gradients.copied,
                put_in_place,
            )
        if has_streams(parameter.device):
            run = _noting_stream(streams, run)
        return _serialised(lock, run) if locked else run

    handles = [
        parameter.register_post_accumulate_grad_hook(hook(index, parameter))  # type: ignore[no-untyped-call]
        for copy in copies
        for index, parameter in enumerate(copy)
    ]
    weakref.finalize(reducer, _remove, handles)
    return ParameterHooks(handles)


def _serialised(lock: threading.Lock, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Serialise ``hook`` over autograd's threads, one for each device: marked gradients must be in place."""

    @never_compile
    def gradient_is_ready(parameter: torch.Tensor) -> None:
        with lock:
            hook(parameter)

    return gradient_is_ready


def _noting_stream(
    streams: GradientStreams, hook: Callable[[torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    """Note the stream of a gradient, then run ``hook``, which may send buckets."""

    @never_compile
    def gradient_is_ready(parameter: torch.Tensor) -> None:
        streams.note(parameter.device)
        hook(parameter)

    return gradient_is_ready


def _on_only_gradient(reducer: Reducer, gradients: Gradients) -> Callable[[int, Mark, bool], None]:
    """The function that the hooks of the only copy call when there is something to do."""
    owner = weakref.ref(reducer)

    @never_compile
    def arrived(index: int, mark: Mark, taken: bool) -> None:
        if (alive := owner()) is not None:
            if not taken:
                alive.preserve_referenced()
                gradients.copy_to_bucket(index)
            if mark is not Mark.ARRIVED:
                alive.on_gradient(index, mark)

    return arrived


def _copy_hook(reducer: Reducer, passes: Pass, index: int, further: bool) -> Callable[[torch.Tensor], None]:
    """Return a hook for one of several copies (``further``: not the first)."""
    mark = passes.mark
    owner = weakref.ref(reducer)

    @never_compile
    def gradient_is_ready(_: torch.Tensor) -> None:
        result = mark(index)
        if result is Mark.ARRIVED or (alive := owner()) is None:
            return
        if result is not Mark.IGNORED:
            alive.on_gradient(index, result)
        elif further:
            alive.sum_copies_later()

    return gradient_is_ready


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


# -- the graph of a forward pass -----------------------------------------------------------------


def outputs_with_graph(output: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in ``output``, a nested structure, that have a ``grad_fn``."""
    return (tensor for tensor in tensors(output) if tensor.grad_fn is not None)


def reachable(outputs: Iterable[torch.Tensor], index_of: Mapping[int, int]) -> set[int]:
    """Return the indices of the parameters reachable in the graph of ``outputs``.

    ``index_of`` maps ``id(parameter)`` to the parameter's index.  Parameters used in reentrant checkpoints
    are not found, since their graph is made during backward.
    """
    found: set[int] = set()
    seen: set[Any] = set()
    pending: list[Any] = [tensor.grad_fn for tensor in outputs]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            variable = getattr(following, "variable", None)
            if variable is None:
                pending.append(following)
            elif (index := index_of.get(id(variable))) is not None:
                found.add(index)
    return found
