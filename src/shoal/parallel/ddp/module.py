"""DistributedDataParallel: the module wrapper around the reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.keywords import explained
from ...common.uncompiled import uncompiled
from ...errors import UsageError
from ...group import ProcessGroup
from ...group.group_argument import given_group
from ..coalesced import broadcast_coalesced
from ..hooks.bucket import CommHook
from ..hooks.calling import check_hook
from ..hooks.optimizer_overlap import hook_then_optimizers_in_backward, take_over_optimizers_in_backward
from ..hooks.plain import allreduce_hook
from ..join import Join, Joinable, JoinHook, takes_named_options
from ..reducer import Reducer, ReducerOptions
from ..reducer.buckets import reduced_dtype
from ..reducer.participants import Participants
from .batch_parts import move_to
from .buffers import BufferSync
from .copies import Copies, Device, pick_devices
from .members import ModuleTensors, delayed_parameters, sparse_dims
from .mixed_precision import LowPrecision, MixedPrecision
from .model_check import ModelWatch, check_can_be_sent, check_same_model, check_trainable
from .uneven import Intent, Intents, Shadow, exchange_intents


class DistributedDataParallel(nn.Module, Joinable):
    """Trains one model on several ranks: each computes gradients of its part of a batch, all get the mean.

    Wrap the model on every rank, and build the optimiser from the wrapped parameters or the module's own
    (they are the same).  Wrapping is collective: it checks that all ranks hold the same model and gives all
    of them rank 0's parameters and buffers.  Where the loss is a mean over equally large parts of a batch,
    training equals that of a single process with the whole batch, up to rounding.

    Gradients are averaged while backward still runs, bucket by bucket; after ``backward()`` returns,
    ``parameter.grad`` holds the average, as a view of a bucket in the group's shared memory.

    A forward pass communicates only to make buffers equal to rank 0's: before the first forward of a step, in
    training mode, with gradients enabled and outside :meth:`no_sync`.  Any rank may run others by itself, to
    evaluate for instance.

    Args:
        module: the model.  Its parameters must not be replaced after wrapping.
        device_ids: devices (numbers are the accelerator's).  One: inputs are moved there, where the module
            must be.  Several: the module, which must be on the first, is copied to the others (the same one
            may be named again), and every forward pass splits its inputs among the copies.
        output_device: where several copies' outputs are joined; the first of ``device_ids`` unless given.
        dim: the dimension along which several copies' inputs are split and their outputs joined.
        group: the ranks to train on: a :class:`~shoal.ProcessGroup`, or a group of torch.distributed over the
            backend "shoal"; None: the default group of ``torch.distributed`` or ``shoal.distributed``.
        broadcast_buffers: make buffers (running statistics, for instance) equal to rank 0's at every step.
        init_sync: give all ranks rank 0's parameters and buffers now, and check that they hold the same
            model. Without it both are up to the caller.
        bucket_cap_mb: largest bucket in MiB.  A smaller one starts communication earlier, a larger one makes
            it more efficient.
        find_unused_parameters: in each pass some parameters may take no part in the loss, others on each
            rank. Those that no rank used keep the gradient that they had (None, as a rule).
        gradient_as_bucket_view: False copies averages into gradients of their own.  With True, gradients on
            the CPU that the program refers to also keep their values when the next backward pass runs.
        static_graph: all passes use the same parameters, equally often; the first shows which.  For layers in
            several reentrant checkpoints, and for parameters that are never used.
        delay_all_reduce_named_params: names and parameters whose reduction waits until the gradient of
            ``param_to_hook_all_reduce`` is there.
        param_to_hook_all_reduce: a parameter that is not among those.
        mixed_precision: run forward, backward or the reduction in a lower precision; parameters and their
            gradients keep their own.
        skip_all_reduce_unused_params: with ``find_unused_parameters``: do not send buckets of which no rank
            uses a parameter; costs one small message a forward pass.
        params_and_buffers_to_ignore: names of parameters and buffers that are left to each rank: they are
            neither compared nor sent, and their gradients stay local.

    Attributes:
        module: the model, as given.
        group: the ranks.

    Raises:
        ModelMismatch: the ranks' models differ; the message says how.
        UsageError: there is nothing to train, a parameter or buffer cannot be sent (a sparse one, for
            example), or options contradict each other.  If only some ranks find that, the others raise
            ModelMismatch.
        OutOfSharedMemory: the buckets do not fit.

    ``backward()`` on an output raises UnusedParameterError on every rank if a parameter of any rank got no
    gradient, OutOfStep if a rank left out a backward pass, and the GroupErrors that
    ``ProcessGroup.all_reduce`` may raise.  See ``docs/data-parallel.md``.
    """

    module: nn.Module
    group: ProcessGroup

    @explained(lambda name, *_: "DistributedDataParallel")
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        group: object = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        skip_all_reduce_unused_params: bool = False,
        params_and_buffers_to_ignore: Iterable[str] = (),
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        ranks = given_group(group, "DistributedDataParallel")
        self.module = module
        self.group = ranks
        self._members = ModuleTensors(module)
        devices: tuple[torch.device, ...] = ()
        output_on: torch.device | None = None
        problem: UsageError | None = None
        try:  # what this rank finds, the others must know: they would wait for it
            self._members = ModuleTensors(module, params_and_buffers_to_ignore)
            if not bucket_cap_mb > 0:
                raise UsageError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
            if skip_all_reduce_unused_params and (static_graph or not find_unused_parameters):
                raise UsageError(
                    "skip_all_reduce_unused_params needs find_unused_parameters=True, and no static_graph"
                )
            check_trainable(module, self._members)
            devices, output_on = pick_devices(self._members.tensors(), device_ids, output_device)
            named = self._members.trained()
            delayed, after = delayed_parameters(
                named, delay_all_reduce_named_params or (), param_to_hook_all_reduce
            )
            if init_sync or broadcast_buffers:
                check_can_be_sent(ranks, self._members)
        except UsageError as error:
            problem = error
        self._chosen = {
            "dim": dim,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "delay_all_reduce_named_params": [n for n, _ in delay_all_reduce_named_params or ()],
            "mixed_precision": mixed_precision,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "params_and_buffers_to_ignore": sorted(self._members.ignored),
        }
        if init_sync:
            self._synchronise(problem)
        elif problem is not None:
            raise problem
        precision = mixed_precision or MixedPrecision()
        self._precision = LowPrecision(module, precision, self._members) if precision.casts else None
        self._inputs_to = devices[0] if len(devices) == 1 else None
        self._copies: Copies | None = None
        if output_on is not None and len(devices) > 1:
            self._copies = Copies(
                module,
                devices,
                output_on,
                dim,
                param_dtype=precision.param_dtype,
                buffer_dtype=precision.buffer_dtype,
            )
        reduce_dtype = precision.reduce_dtype or precision.param_dtype
        options = ReducerOptions(
            cap=max(1, int(bucket_cap_mb * 2**20)),
            find_unused=find_unused_parameters,
            static_graph=static_graph,
            as_views=gradient_as_bucket_view
            and all(reduced_dtype(parameter, reduce_dtype) == parameter.dtype for _, parameter in named),
            skip_unused=skip_all_reduce_unused_params,
            sparse=sparse_dims(module, named),
            delayed=delayed,
            after=after,
            masters=self._precision is not None,
            reduce_dtype=reduce_dtype,
        )
        names = [name for name, _ in named]
        self._reducer: Reducer | None = Reducer(ranks, names, self._all_copies(names), options)
        if carrying := take_over_optimizers_in_backward(parameter for _, parameter in named):
            self._reducer.set_hook(None, hook_then_optimizers_in_backward(allreduce_hook))
            self._reducer.after_pass.append(partial(_forget_gradients, carrying))
        self._passes_before = 0
        self._buffers_in_step = BufferSync(ranks, module, self._members) if broadcast_buffers else None
        self._watch = ModelWatch(module, self._members, ranks.rank)
        self._participants = Participants()
        self._synchronised = True
        self._divide_by_initial_world_size = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.  With gradients enabled, the backward pass through its output will be reduced."""
        if not torch.is_grad_enabled():
            return self._run(args, kwargs)
        inside = self._before()
        output = self._run(args, kwargs)
        if not inside:
            self._after(output)
        return output

    # The code around the module is nothing to compile; the module itself may be.
    @uncompiled
    def _before(self) -> bool:
        """Whether the forward pass that comes is part of a backward pass (checkpointing repeats it there)."""
        reducer = self._active_reducer()
        if reducer.in_backward() or (self._precision is not None and self._precision.in_backward):
            return True
        reducer.end_interrupted()
        self._watch.check()
        self._end_of_batch()
        if self._join_config.enable:
            Join.notify_join_context(self)
            self._participants = Participants(
                partial(self._found, exchange_intents(self.group, self._intent()))
            )
        if self._intent() is Intent.REDUCE_AFTER_BUFFERS:
            self._refresh_buffers(self._participants)
        return False

    @uncompiled
    def _after(self, output: Any) -> None:
        if self._synchronised:
            ran = self._copies.ran if self._copies is not None else None
            self._active_reducer().expect(
                output, counts=self.training, participants=self._participants, copies=ran
            )
        else:
            self._active_reducer().ignore(output)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Forward on the right devices, in the right precision."""
        if self._inputs_to is not None:
            args, kwargs = move_to((args, kwargs), self._inputs_to)
        if self._precision is None and self._copies is None:
            return self.module(*args, **kwargs)
        return self._run_otherwise(args, kwargs)

    @uncompiled
    def _run_otherwise(self, args: Any, kwargs: Any) -> Any:
        """Forward in several copies, in lower precision, or both."""
        precision, copies = self._precision, self._copies
        step = self._passes_before + (self._reducer.passes if self._reducer is not None else 0)
        first: Callable[..., Any] = self.module
        if precision is not None:
            precision.refresh(step)
            args, kwargs = precision.cast_inputs((args, kwargs))
            first = precision.run
        output = first(*args, **kwargs) if copies is None else copies(first, args, kwargs, step)
        if precision is not None and torch.is_grad_enabled():
            precision.watch(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context forward and backward passes stay local: gradients accumulate on each rank.

        The first backward pass whose forward ran outside reduces the sum.  It is the forward pass that must
        run within the context.
        """
        before = self._synchronised
        self._synchronised = False
        try:
            yield
        finally:
            self._synchronised = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook`` average the buckets, in the place of an all-reduce.  The same one on every rank.

        Args:
            state: given to every call; for the hooks of ``shoal.parallel.hooks`` see there.
            hook: ``hook(state, bucket: GradBucket) -> Future[Tensor]``, called in backward for every bucket,
                in the same order on all ranks.  The future has a tensor with as many elements as
                ``bucket.buffer()``: the average, which the hook divides itself.  Sparse gradients do not go
                through hooks.

        Raises:
            UsageError: it cannot be called so, or a hook was registered before, or backward has begun.
        """
        check_hook(hook)
        self._active_reducer().set_hook(state, hook)

    def synchronise(self) -> None:
        """Give all ranks rank 0's parameters and buffers; check that they hold the same model.  Collective.

        What ``init_sync`` asks for.

        Raises:
            ModelMismatch: they do not; on every rank.
            UsageError: a parameter or buffer cannot be sent, on the ranks that have such a one.
        """
        problem = None
        try:
            check_can_be_sent(self.group, self._members)
        except UsageError as error:
            problem = error
        self._synchronise(problem)

    def _synchronise(self, problem: UsageError | None) -> None:
        check_same_model(self.group, self._members, self._chosen, problem)
        broadcast_coalesced(self.group, self._members.tensors())

    # -- another group ---------------------------------------------------------------------------

    def check_regroup(self) -> None:
        """Find out whether :meth:`regroup` can work, long before it must.

        Raises:
            UsageError: a communication hook with a state, or an optimiser in backward, is in the way.
        """
        self._active_reducer().check_regroup()
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self.module.parameters()):
            raise UsageError(
                "this DistributedDataParallel cannot follow another group: its parameters carry optimisers "
                "that run in backward, so ranks would differ when one is lost in a backward pass"
            )

    def regroup(self, group: ProcessGroup) -> None:
        """Train over ``group`` from now on.  Every rank of it calls this; nothing is sent.

        Gradients stay what they are.  A backward pass that was under way is dropped, and the order in which
        gradients arrive is learnt anew.

        Args:
            group: of ranks that hold equal parameters, as the survivors of a lost rank do.

        Raises:
            UsageError: as of :meth:`check_regroup`.
            OutOfSharedMemory: the buckets do not fit.
        """
        self.check_regroup()
        old = self._active_reducer()
        self._passes_before += old.passes + 1
        self._reducer = old.over(group)
        self.group = group
        if self._buffers_in_step is not None:
            self._buffers_in_step = BufferSync(group, self.module, self._members)
        self._participants = Participants()

    # -- uneven inputs ---------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A :class:`Join` of this model alone: ``with model.join(): ...``.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks, as if those without a
                batch had gradients of zero.  False divides by the number of ranks that have one.
            enable: False does nothing.
            throw_on_early_termination: raise on every rank as soon as one has no batch any more.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    @takes_named_options
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        """For a :class:`Join`.

        Args:
            divide_by_initial_world_size: see :meth:`join`.
            kwargs: those of other joinables.
        """
        self._divide_by_initial_world_size = bool(divide_by_initial_world_size)
        return Shadow(self.group, self._members, self._shadow)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks."""
        return self.group

    def _intent(self) -> Intent:
        if not self._synchronised:
            return Intent.LOCAL
        if self.training and self._buffers_in_step is not None:
            return Intent.REDUCE_AFTER_BUFFERS
        return Intent.REDUCE

    def _scale(self, intents: Intents) -> float:
        return 1.0 if self._divide_by_initial_world_size else self.group.size / intents.active

    def _found(self, intents: Callable[[], Intents]) -> tuple[int, float]:
        found = intents()
        return found.first, self._scale(found)

    def _end_of_batch(self) -> None:
        # A pass that is not reduced has not asked yet whether the others treated their batches alike.
        participants, self._participants = self._participants, Participants()
        participants.resolve()

    def _shadow(self, intents: Intents) -> None:
        """Do what the other ranks do in this step."""
        reducer = self._active_reducer()
        reducer.end_interrupted()
        participants = Participants(lambda: (intents.first, self._scale(intents)))
        if intents.intent is Intent.REDUCE_AFTER_BUFFERS:
            self._refresh_buffers(participants)
        if intents.intent is not Intent.LOCAL:
            reducer.shadow(participants)

    # -- inside ----------------------------------------------------------------------------------

    def _all_copies(self, names: Sequence[str]) -> list[list[torch.Tensor]]:
        """The trained parameters, and their counterparts in all copies."""
        modules = self._copies.modules if self._copies is not None else (self.module,)
        copies: list[list[torch.Tensor]] = []
        for module in modules:
            by_name = dict(module.named_parameters())
            copies.append([by_name[name] for name in names])
        if self._precision is not None:
            copies.insert(1, self._precision.counterparts(copies[0]))
        return copies

    def _refresh_buffers(self, participants: Participants) -> None:
        if self._buffers_in_step is not None and self._buffers_in_step.any:
            self._buffers_in_step.refresh(self._active_reducer().passes, participants.first)

    def waited(self) -> float:
        """Seconds for which backward passes have waited for the other ranks, in the present group."""
        return self._active_reducer().waited

    def _active_reducer(self) -> Reducer:
        if self._reducer is None:
            raise UsageError(
                "this DistributedDataParallel is a copy or came out of a file, and belongs to no group: "
                "wrap its .module again (or use it under torch.no_grad())"
            )
        return self._reducer

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        del state["group"]
        inactive = (
            "_reducer",
            "_buffers_in_step",
            "_watch",
            "_copies",
            "_precision",
            "_inputs_to",
            "_members",
        )
        return state | dict.fromkeys(inactive) | {"_participants": Participants()}


def _forget_gradients(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
