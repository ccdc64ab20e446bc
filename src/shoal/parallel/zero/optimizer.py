"""ZeroRedundancyOptimizer: each rank keeps the optimiser state of its share of the parameters.

With data parallelism all ranks would compute the same update from the same state.  Instead, each rank updates
some parameters and sends them to the others.  This is the first stage of Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (2020); the interface is that of torch's class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...common.arguments import accept_both_group_names
from ...common.copy_refusal import refuses_copies
from ...errors import GroupError, UsageError
from ...group import ProcessGroup
from ...group.group_argument import has_default_group, resolve_group
from ...group.rebuild import GroupOwner
from ..consistency import check_same
from ..join import Join, Joinable, JoinHook, takes_named_options
from .arguments import MISMATCH, check_can_be_sent, check_copies, checked_parameters, describe
from .checkpoint import PER_PARAMETER, gather_state, packed, part_of_group, part_of_state
from .ownership import GatherProgress, Ownership, all_parameters, unfinished_gather


@refuses_copies(
    "a ZeroRedundancyOptimizer",
    "a part of the state of its group",
    "Call consolidate_state_dict() on all ranks and save or copy state_dict()",
)
@accept_both_group_names
class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimiser with its state distributed over the ranks that train a model.

        model = shoal.DistributedDataParallel(net, group=group)
        optimizer = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, group=group, lr=1e-3)

    Each parameter has an owner, which keeps its state and computes its update; then all owners send their
    parameters to all ranks.  Parameters are always equal on all ranks.  If gradients are equal too (as with
    DistributedDataParallel), results are bitwise those of ``optimizer_class`` without distribution.

    All ranks must construct it with the same arguments, which are compared, and call :meth:`step`,
    :meth:`add_param_group` and :meth:`consolidate_state_dict` together.  Everything else is as for any
    optimiser: parameter groups, learning rate schedulers, closures, hooks, ``zero_grad``.

    Args:
        params: as for any optimiser: tensors, pairs of name and tensor, or dictionaries for groups.
        optimizer_class: the class of the inner optimiser, which must update each parameter independently,
            like all of ``torch.optim`` except LBFGS.
        group: a :class:`~shoal.ProcessGroup`, or a group of torch.distributed with the backend "shoal"; None:
            the default group of ``torch.distributed`` or ``shoal.distributed``, or if there is none and
            ``copies`` is above 1, that of the ``elastic.Session`` that will train with this optimiser.
        parameters_as_bucket_view: make the parameters views of registered memory, for one message per rank.
            Changes their ``data``, but not their values.
        overlap_with_ddp: update parameters during backward, in a communication hook made by
            ``shoal.parallel.hooks.hook_with_zero_step``.  :meth:`step` then updates nothing.
        copies: number of ranks, on different hosts if possible, that keep the state of a parameter and
            compute its update.  Needs no more messages, but gradients that are equal on all ranks.
        defaults: keyword arguments for ``optimizer_class``.

    Attributes:
        group: the current group.
        optim: the inner optimiser, with this rank's parameters only.
        state: the state of the inner optimiser.
        overlap_with_ddp, copies: the arguments.

    Raises:
        UsageError: there are no parameters, an argument is invalid, or ``copies`` is out of range.
        ModelMismatch: the ranks' parameters or options differ; the message lists the differences.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        group: object = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        copies: int = 1,
        **defaults: Any,
    ) -> None:
        given = checked_parameters(params, optimizer_class)
        ranks = None
        if group is not None or copies == 1 or has_default_group():
            ranks = resolve_group(group, "ZeroRedundancyOptimizer")
        if overlap_with_ddp and parameters_as_bucket_view:
            raise UsageError(
                "with overlap_with_ddp=True parameters are sent for each bucket of gradients; omit "
                "parameters_as_bucket_view"
            )
        check_copies(copies, None if ranks is None else ranks.size, overlap_with_ddp=overlap_with_ddp)
        self.overlap_with_ddp = overlap_with_ddp
        self.copies = copies
        #: Whether a hook updates parameters in backward.
        self.hooked = False
        self._ownership = Ownership(
            ranks, copies, as_views=parameters_as_bucket_view, sends=not overlap_with_ddp
        )
        self._leader: GroupOwner | None = None
        self._gather_progress = GatherProgress()
        #: Number of later gather calls to skip, because :meth:`settle` has already done their work.
        self._gathered = 0
        self._consolidated: dict[str, Any] | None = None
        self._made = False
        Optimizer.__init__(self, given, dict(defaults))
        Joinable.__init__(self)
        self._settings = {
            "optimizer_class": f"{optimizer_class.__module__}.{optimizer_class.__qualname__}",
            "parameters_as_bucket_view": repr(parameters_as_bucket_view),
            "overlap_with_ddp": repr(overlap_with_ddp),
            "copies": repr(copies),
        }
        self._check_same(0, self._settings)
        self._ownership.add(all_parameters(self.param_groups))
        self.optim = optimizer_class(
            [part_of_group(group, self._ownership.is_own) for group in self.param_groups], **defaults
        )
        self.defaults = self.optim.defaults
        self.state = self.optim.state
        _copy_options(self.optim.param_groups, self.param_groups)
        self._made = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters that this rank owns, and receive the others.  Collective.

        Args:
            closure: recomputes the loss and its gradients; on all ranks.
            kwargs: keyword arguments for the step of the inner optimiser.

        Returns:
            The result of the step of the inner optimiser: the loss of ``closure``.
        """
        Join.notify_join_context(self)
        if self.overlap_with_ddp:
            return self._step_in_backward(closure)
        self._ownership.check_group()
        self.prepare_step()
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure, **kwargs)
        _copy_options(self.optim.param_groups, self.param_groups)
        self._ownership.updated()
        while not self._ownership.has_all_parameters:
            with self._continue_after_loss():
                if self._ownership.is_settled:
                    self._ownership.exchange()
                else:
                    self._settle_with_others()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on all ranks.  Previous parameters keep their owners.  Collective."""
        if self._made:
            self._settle_with_others()
        super().add_param_group(param_group)
        if not self._made:
            return  # called by the constructor, which assigns all groups together
        index = len(self.param_groups) - 1
        try:
            self._check_same(index, {})
        except BaseException:
            del self.param_groups[index]
            raise
        self._consolidated = None
        added = self.param_groups[index:]
        self._ownership.add(all_parameters(added))
        self.optim.add_param_group(part_of_group(added[0], self._ownership.is_own))
        _copy_options(self.optim.param_groups, self.param_groups)

    # -- checkpoints -----------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks in CPU memory of rank ``to``, for :meth:`state_dict` there.
        Collective.

        It is kept until the next step.
        """
        if not 0 <= to < self.group.size:
            raise UsageError(f"to={to!r} is not a rank of {self.group!r}")
        if self._gathered:
            self._gathered -= 1
            return
        self._gather_progress = GatherProgress(self._gather_progress.begun + 1, to, is_running=True)
        try:
            while self._gather_progress.is_running:
                with self._continue_after_loss():
                    self._settle_with_others()
                    if self._gather_progress.is_running:
                        self._gather(to)
        finally:
            self._gather_progress = self._gather_progress._replace(is_running=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, in the form of the inner optimiser without distribution.

        Raises:
            UsageError: the state was not consolidated on this rank since the last step.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = self._consolidated
        if result is None and all(map(self._ownership.is_own, all_parameters(self.param_groups))):
            result = packed(self._own_state(self._ownership.is_own), self.param_groups)
        if result is None:
            raise UsageError(
                f"rank {self.group.rank} has only its own part of the optimiser's state; call "
                f"consolidate_state_dict(to={self.group.rank}) on all ranks after the last step, then "
                f"state_dict() on rank {self.group.rank} alone"
            )
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            if changed is not None:
                result = changed
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state of all parameters.  Not collective.

        Args:
            state_dict: from :meth:`state_dict` on any number of ranks, or from the inner optimiser alone.

        Raises:
            UsageError: its parameter groups differ.
        """
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, loaded)
            if changed is not None:
                loaded = changed
        self._consolidated = None
        self._ownership.own_all_if_unsettled(self.param_groups, self.optim)
        self.optim.load_state_dict(part_of_state(loaded, self.param_groups, self._ownership.is_own))
        self.state = self.optim.state
        _copy_options(self.optim.param_groups, self.param_groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # -- another group -----------------------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """The current group."""
        return self._ownership.group

    @property
    def present_group(self) -> ProcessGroup | None:
        """The current group; None: no session has set it yet."""
        return self._ownership.present_group

    def check_regroup(self) -> None:
        """Raise UsageError if :meth:`regroup` is not possible because there is only one copy of the state."""
        if self.copies == 1:
            raise UsageError(
                "this ZeroRedundancyOptimizer cannot move to another group: it keeps each part of its state "
                "on one rank, and that part is lost with the rank.  Make it with copies=2"
            )

    def regroup(self, group: ProcessGroup) -> None:
        """Use ``group`` from now on.  Every rank of it must call this; nothing is sent before :meth:`settle`.

        Args:
            group: a group of ranks that have this optimiser of the same parameters, with or without state.

        Raises:
            UsageError: as for :meth:`check_regroup`.
        """
        self.check_regroup()
        self._ownership.move_to(group)

    def settle(self) -> None:
        """Exchange missing parameters and state, if the group is new.  Collective.

        Every rank must call it after the same number of calls of :meth:`step`; without a call, the end of the
        next :meth:`step` does it, or another method that needs the state.  Owners keep their state.  A state
        with fewer owners than ``copies`` is sent to the rank with the least load.  An interrupted exchange of
        parameters is repeated.  A rank that has computed fewer steps counts as a rank without state.

        Raises:
            GroupError: a rank is lost; call it again after the next :meth:`regroup`.
            StateLost: all owners of a parameter are lost.
            StateDiverged: the owners of a parameter have different states.
            ModelMismatch: the ranks have different parameters.
        """
        if self._ownership.is_settled:
            return
        rank_states = self._ownership.settle(
            self.param_groups, self.optim, self._settings, self._gather_progress
        )
        again = unfinished_gather(rank_states)
        if again is not None and again.to < self.group.size:
            self._gather(again.to)
        last = max(each.gather_progress for each in rank_states)._replace(is_running=False)
        if rank_states[self.group.rank].steps == self._ownership.steps:  # otherwise this rank has just joined
            self._gathered += last.begun - self._gather_progress.begun
        self._gather_progress = last

    def follow(self, leader: GroupOwner | None) -> None:
        """Let :meth:`step` and :meth:`consolidate_state_dict` continue when a rank is lost during them.

        ``leader`` makes a new group in this case.  None: raise the error (the default).
        """
        self._leader = leader

    def discard_state(self) -> None:
        """Ignore the state of this rank in the next :meth:`settle`, which receives that of other ranks."""
        self._ownership.steps = -1

    def load_common_options(self, common: Mapping[str, Any]) -> None:
        """Copy the options from :meth:`common_options` of another rank; :meth:`settle` does the rest.

        Raises ValueError if the parameter groups differ.
        """
        _copy_options(common["param_groups"], self.param_groups)

    def common_options(self) -> dict[str, Any]:
        """Return the values that must be equal on all ranks: the number of steps, and the options."""
        groups = [{**group, "params": len(group["params"])} for group in self.param_groups]
        return {"steps": self._ownership.steps, "param_groups": groups}

    # -- for hooks that update parameters in backward -----------------------------------------------

    def prepare_step(self) -> None:
        """Copy options that schedulers and users changed to the inner optimiser."""
        self._consolidated = None
        _copy_options(self.param_groups, self.optim.param_groups)

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Return the rank that updates and sends ``parameter``, or None if it was never added."""
        return self._ownership.owner(parameter)

    def _step_in_backward(self, closure: Callable[[], Any] | None) -> Any:
        if not self.hooked:
            raise UsageError(
                "with overlap_with_ddp=True a hook updates parameters in backward, but none is registered: "
                "model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))"
            )
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    # -- as a Joinable ---------------------------------------------------------------------------

    @takes_named_options
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook that takes part in the steps of the other ranks, with their gradients."""
        return _ZeroHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group."""
        return self.group

    # -- inside ------------------------------------------------------------------------------------

    def _gather(self, to: int) -> None:
        """Gather the state of all ranks on rank ``to``.  Collective."""
        self._consolidated = None
        # Only one of its owners sends the state of a parameter.
        state = gather_state(self.group, self._own_state(self._ownership.is_sent_from_here), to)
        if state is not None:
            _copy_options(self.param_groups, self.optim.param_groups)
            self._consolidated = packed(state, self.param_groups)
        self._gather_progress = self._gather_progress._replace(is_running=False)

    @contextlib.contextmanager
    def _continue_after_loss(self) -> Iterator[None]:
        """Suppress the error of a lost rank if the leader continues without that rank."""
        try:
            yield
        except GroupError as error:
            if self._leader is None or not self._leader.goes_on(error):
                raise

    def _settle_with_others(self) -> None:
        """Settle, through the leader if there is one, which settles its other components too."""
        if not self._ownership.is_settled and self._leader is not None:
            self._leader.settle()
        else:
            self.settle()

    def _own_state(self, chosen: Callable[[torch.Tensor], bool]) -> dict[Any, Any]:
        """Return the state of this rank's ``chosen`` parameters, by parameter number."""
        own = [
            (number, parameter)
            for number, parameter in enumerate(all_parameters(self.param_groups))
            if self._ownership.is_own(parameter)
        ]
        state = self.optim.state_dict()["state"]
        return {
            own[key][0] if isinstance(key, int) else key: value
            for key, value in state.items()
            if not isinstance(key, int) or chosen(own[key][1])
        }

    def _check_same(self, first: int, settings: Mapping[str, str]) -> None:
        """Check that all ranks have the same parameter groups from ``first`` on.  Collective.

        Without a group, :meth:`settle` does it later.
        """
        if self._ownership.present_group is None:
            return
        check_same(self.group, MISMATCH, describe(self.param_groups[first:], settings, first))
        check_can_be_sent(self.param_groups[first:], first)


class _ZeroHook(JoinHook):
    """The hook of a rank without batches, which still updates its parameters for the others."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.step()


def _copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy options, such as learning rates, from one list of parameter groups to another."""
    for given, taken in zip(source, target, strict=True):
        for name, value in given.items():
            if name not in PER_PARAMETER:
                taken[name] = value
