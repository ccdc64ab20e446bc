"""The DistributedDataParallel wrapper, which runs a model and its reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.arguments import accept_both_group_names, explain_unknown_keywords
from ...common.never_compile import never_compile
from ...errors import UsageError
from ...group import ProcessGroup
from ...group.group_argument import resolve_group
from ..coalesced import broadcast_coalesced
from ..hooks.allreduce import allreduce_hook
from ..hooks.contract import CommHook, check_hook
from ..hooks.optimizer_overlap import hook_then_optimizers_in_backward, take_over_optimizers_in_backward
from ..join import Join, Joinable, JoinHook, takes_named_options
from ..reducer import Participants, Reducer, ReducerOptions
from ..reducer.buckets import reduced_dtype
from .copies import Copies, Device, move_to, pick_devices
from .mixed_precision import LowPrecision, MixedPrecision
from .model_check import ModelChangeDetector, check_can_be_sent, check_same_model, check_trainable
from .module_tensors import BufferSync, ModuleTensors, delayed_parameters, sparse_dims
from .uneven import DDPJoinHook, Intent, Intents, exchange_intents


@accept_both_group_names
class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a model for data-parallel training: gradients are averaged over all ranks.

    Wrap the model on every rank, and construct the optimiser from the parameters of the wrapper or of the
    module (they are the same).  Wrapping is collective: it checks that all ranks have the same model and
    broadcasts rank 0's parameters and buffers.  If the loss is a mean over equally large parts of a batch,
    training equals that of a single process with the whole batch, up to rounding.

    Gradients are averaged in buckets while backward still runs.  After ``backward()``, ``parameter.grad`` is
    the average, a view of a bucket in the group's shared memory.

    A forward pass communicates only to broadcast rank 0's buffers: before the first forward of a step, in
    training mode, with gradients enabled and outside :meth:`no_sync`.  Other forward passes, for example for
    evaluation, may run on any subset of ranks.

    Args:
        module: the model.  Its parameters must not be replaced after wrapping.
        device_ids: devices, or indices of accelerators.  With one, inputs are moved to it; the module must be
            there.  With several, the module must be on the first and is copied to the others (a device may
            occur several times), and every forward pass splits its inputs among the copies.
        output_device: the device of the copies' concatenated outputs; default: the first of ``device_ids``.
        dim: the dimension along which inputs are split among copies and their outputs concatenated.
        group: a :class:`~shoal.ProcessGroup`, or a group of torch.distributed with the backend "shoal"; None:
            the default group of ``torch.distributed`` or ``shoal.distributed``.
        broadcast_buffers: broadcast rank 0's buffers (running statistics, for example) in every step.
        init_sync: check now that all ranks have the same model, and broadcast rank 0's parameters and
            buffers.  If False, the caller must ensure both.
        bucket_cap_mb: maximum size of a bucket in MiB.  Smaller buckets start communication earlier, larger
            ones are more efficient.
        find_unused_parameters: allow parameters without a gradient, different ones in each pass and on each
            rank.  Parameters unused on all ranks keep their previous gradient (usually None).
        gradient_as_bucket_view: False copies averages out of the buckets.  With True, gradients on the CPU
            that the program references also keep their values in the next backward pass.
        static_graph: all passes use the same parameters equally often, as found in the first one.  Needed for
            layers in several reentrant checkpoints; allows parameters that are never used.
        delay_all_reduce_named_params: names and parameters to reduce only after the gradient of
            ``param_to_hook_all_reduce`` has arrived.
        param_to_hook_all_reduce: a parameter that is not in ``delay_all_reduce_named_params``.
        mixed_precision: run forward, backward or the reduction in a lower precision; parameters and their
            gradients keep their own.
        skip_all_reduce_unused_params: with ``find_unused_parameters``: do not send buckets without a
            parameter used on any rank.  Costs one small message for each forward pass.
        params_and_buffers_to_ignore: names of parameters and buffers that stay local to each rank: they are
            neither compared nor sent, and their gradients are not averaged.

    Attributes:
        module: the model.
        group: the group.

    Raises:
        ModelMismatch: the ranks' models differ; the message lists the differences.
        UsageError: there is nothing to train, a parameter or buffer cannot be sent (a sparse one, for
            example), or options contradict each other.  If only some ranks do so, others raise ModelMismatch.
        OutOfSharedMemory: the buckets do not fit into shared memory.

    ``backward()`` on an output raises UnusedParameterError on every rank if a parameter on any rank got no
    gradient, OutOfStep if a rank skipped a backward pass, and the errors of ``ProcessGroup.all_reduce``.  See
    ``docs/data-parallel.md``.
    """

    module: nn.Module
    group: ProcessGroup

    @explain_unknown_keywords(lambda name, *_: "DistributedDataParallel")
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        group: object = None,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        bucket_cap_mb: float | None = 25,
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
        ranks = resolve_group(group, "DistributedDataParallel")
        broadcast_buffers = True if broadcast_buffers is None else broadcast_buffers  # None: as in torch
        bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        self.module = module
        self.group = ranks
        self._managed_tensors = ModuleTensors(module)
        devices: tuple[torch.device, ...] = ()
        output_on: torch.device | None = None
        problem: UsageError | None = None
        try:  # errors are sent to the other ranks, which would otherwise wait for this one
            self._managed_tensors = ModuleTensors(module, params_and_buffers_to_ignore)
            if not bucket_cap_mb > 0:
                raise UsageError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
            if skip_all_reduce_unused_params and (static_graph or not find_unused_parameters):
                raise UsageError(
                    "skip_all_reduce_unused_params needs find_unused_parameters=True, and no static_graph"
                )
            check_trainable(module, self._managed_tensors)
            devices, output_on = pick_devices(self._managed_tensors.tensors(), device_ids, output_device)
            named = self._managed_tensors.trained()
            delayed, delayed_until = delayed_parameters(
                named, delay_all_reduce_named_params or (), param_to_hook_all_reduce
            )
            if init_sync or broadcast_buffers:
                check_can_be_sent(ranks, self._managed_tensors)
        except UsageError as error:
            problem = error
        self._settings = {
            "dim": dim,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "delay_all_reduce_named_params": [n for n, _ in delay_all_reduce_named_params or ()],
            "mixed_precision": mixed_precision,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "params_and_buffers_to_ignore": sorted(self._managed_tensors.ignored),
        }
        if init_sync:
            self._synchronise(problem)
        elif problem is not None:
            raise problem
        precision = mixed_precision or MixedPrecision()
        self._precision = LowPrecision(module, precision, self._managed_tensors) if precision.casts else None
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
            max_bytes=max(1, int(bucket_cap_mb * 2**20)),
            find_unused=find_unused_parameters,
            static_graph=static_graph,
            as_views=gradient_as_bucket_view
            and all(reduced_dtype(parameter, reduce_dtype) == parameter.dtype for _, parameter in named),
            skip_unused=skip_all_reduce_unused_params,
            sparse=sparse_dims(module, named),
            delayed=delayed,
            delayed_until=delayed_until,
            has_master_copy=self._precision is not None,
            reduce_dtype=reduce_dtype,
        )
        names = [name for name, _ in named]
        self._reducer: Reducer | None = Reducer(ranks, names, self._all_copies(names), options)
        if carrying := take_over_optimizers_in_backward(parameter for _, parameter in named):
            self._reducer.set_hook(None, hook_then_optimizers_in_backward(allreduce_hook))
            self._reducer.after_pass.append(partial(_clear_gradients, carrying))
        self._passes_before = 0
        self._buffers_in_step = BufferSync(ranks, self._managed_tensors) if broadcast_buffers else None
        self._change_detector = ModelChangeDetector(module, self._managed_tensors, ranks.rank)
        self._participants = Participants()
        self._sync_enabled = True
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

    # The wrapper's own code is not compiled; the module may be.
    @never_compile
    def _before(self) -> bool:
        """Whether the next forward pass is part of a backward pass (checkpointing repeats it there)."""
        reducer = self._active_reducer()
        if reducer.in_backward() or (self._precision is not None and self._precision.in_backward):
            return True
        reducer.end_interrupted()
        self._change_detector.check()
        self._end_of_batch()
        if self._join_config.enable:
            Join.notify_join_context(self)
            self._participants = Participants(
                partial(self._found, exchange_intents(self.group, self._intent()))
            )
        if self._intent() is Intent.REDUCE_AFTER_BUFFERS:
            self._refresh_buffers(self._participants)
        return False

    @never_compile
    def _after(self, output: Any) -> None:
        if self._sync_enabled:
            used_copies = self._copies.used_copies if self._copies is not None else None
            self._active_reducer().reduce_backward(
                output, counts=self.training, participants=self._participants, copies=used_copies
            )
        else:
            self._active_reducer().skip_backward(output)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Run forward on the right devices, in the right precision."""
        if self._inputs_to is not None:
            args, kwargs = move_to((args, kwargs), self._inputs_to)
        if self._precision is None and self._copies is None:
            return self.module(*args, **kwargs)
        return self._run_wrapped(args, kwargs)

    @never_compile
    def _run_wrapped(self, args: Any, kwargs: Any) -> Any:
        """Run forward in several copies, in lower precision, or both."""
        precision, copies = self._precision, self._copies
        step = self._passes_before + (self._reducer.passes if self._reducer is not None else 0)
        first: Callable[..., Any] = self.module
        if precision is not None:
            precision.refresh(step)
            args, kwargs = precision.cast_inputs((args, kwargs))
            first = precision.run
        output = first(*args, **kwargs) if copies is None else copies(first, args, kwargs, step)
        if precision is not None and torch.is_grad_enabled():
            precision.hook_outputs(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context manager that keeps passes local, so that gradients accumulate on each rank.

        It applies to backward passes whose forward pass ran in the context.  The first backward pass whose
        forward pass ran outside reduces the sum.
        """
        before = self._sync_enabled
        self._sync_enabled = False
        try:
            yield
        finally:
            self._sync_enabled = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Average the buckets with ``hook`` instead of an all-reduce.  Must be the same on every rank.

        Args:
            state: passed to every call; for the hooks of ``shoal.parallel.hooks`` see there.
            hook: ``hook(state, bucket: GradBucket) -> Future[Tensor]``, called in backward for every bucket,
                in the same order on all ranks.  The future's value is the average (the hook itself divides),
                with as many elements as ``bucket.buffer()``.  Hooks are not called for sparse gradients.

        Raises:
            UsageError: ``hook`` has another signature, a hook is already registered, or backward has begun.
        """
        check_hook(hook)
        self._active_reducer().set_hook(state, hook)

    def synchronise(self) -> None:
        """Check that all ranks have the same model; broadcast rank 0's tensors.  Collective.

        Raises:
            ModelMismatch: the ranks' models differ; on every rank.
            UsageError: a parameter or buffer of this rank cannot be sent.
        """
        problem = None
        try:
            check_can_be_sent(self.group, self._managed_tensors)
        except UsageError as error:
            problem = error
        self._synchronise(problem)

    def _synchronise(self, problem: UsageError | None) -> None:
        check_same_model(self.group, self._managed_tensors, self._settings, problem)
        broadcast_coalesced(self.group, self._managed_tensors.tensors())

    # -- another group ---------------------------------------------------------------------------

    def check_regroup(self) -> None:
        """Raise unless :meth:`regroup` is possible.  Call it early, before a rank is lost.

        Raises:
            UsageError: there is a communication hook with a state, or an optimiser that runs in backward.
        """
        self._active_reducer().check_regroup()
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self.module.parameters()):
            raise UsageError(
                "this DistributedDataParallel cannot move to another group: its parameters have optimisers "
                "that run in backward, so ranks would differ when one is lost in a backward pass"
            )

    def regroup(self, group: ProcessGroup) -> None:
        """Train over ``group`` from now on.  Every rank of it must call this; nothing is sent.

        Gradients are kept.  A running backward pass is dropped, and the order in which gradients arrive is
        determined again.

        Args:
            group: a group of ranks with equal parameters, such as the survivors of a lost rank.

        Raises:
            UsageError: as for :meth:`check_regroup`.
            OutOfSharedMemory: the buckets do not fit into shared memory.
        """
        self.check_regroup()
        old = self._active_reducer()
        self._passes_before += old.passes + 1
        self._reducer = old.rebuilt_for(group)
        self.group = group
        if self._buffers_in_step is not None:
            self._buffers_in_step = BufferSync(group, self._managed_tensors)
        self._participants = Participants()

    # -- uneven inputs ---------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a :class:`Join` of this model alone: ``with model.join(): ...``.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks, as if ranks without a
                batch had zero gradients.  False divides by the number of ranks with a batch.
            enable: False disables the Join.
            throw_on_early_termination: raise on every rank as soon as one has no more batches.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    @takes_named_options
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        """Return the hook for a :class:`Join`.

        Args:
            divide_by_initial_world_size: see :meth:`join`.
            kwargs: arguments for other joinables, ignored.
        """
        self._divide_by_initial_world_size = bool(divide_by_initial_world_size)
        return DDPJoinHook(self.group, self._managed_tensors, self._shadow)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group."""
        return self.group

    def _intent(self) -> Intent:
        if not self._sync_enabled:
            return Intent.LOCAL
        if self.training and self._buffers_in_step is not None:
            return Intent.REDUCE_AFTER_BUFFERS
        return Intent.REDUCE

    def _found(self, intents: Callable[[], Intents]) -> tuple[int, float]:
        found = intents()
        divide_by_all = self._divide_by_initial_world_size
        return found.first, 1.0 if divide_by_all else self.group.size / found.active

    def _end_of_batch(self) -> None:
        # For a pass that was not reduced, the intents of the other ranks are not checked yet.
        participants, self._participants = self._participants, Participants()
        participants.resolve()

    def _shadow(self, intents: Intents) -> None:
        """Take part in the collectives of the other ranks in this step."""
        reducer = self._active_reducer()
        reducer.end_interrupted()
        participants = Participants(partial(self._found, lambda: intents))
        if intents.intent is Intent.REDUCE_AFTER_BUFFERS:
            self._refresh_buffers(participants)
        if intents.intent is not Intent.LOCAL:
            reducer.shadow(participants)

    # -- inside ----------------------------------------------------------------------------------

    def _all_copies(self, names: Sequence[str]) -> list[list[torch.Tensor]]:
        """Return the trained parameters of all copies, and their counterparts in lower precision."""
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
        """Seconds for which backward passes have waited for other ranks, in the current group."""
        return self._active_reducer().waited

    def _active_reducer(self) -> Reducer:
        if self._reducer is None:
            raise UsageError(
                "this DistributedDataParallel is a copy or was loaded from a file, and belongs to no group: "
                "wrap its .module again (or use it under torch.no_grad())"
            )
        return self._reducer

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        del state["group"]
        inactive = (
            "_reducer",
            "_buffers_in_step",
            "_change_detector",
            "_copies",
            "_precision",
            "_inputs_to",
            "_managed_tensors",
        )
        return state | dict.fromkeys(inactive) | {"_participants": Participants()}


def _clear_gradients(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
