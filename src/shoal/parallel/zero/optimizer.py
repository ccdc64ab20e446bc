"""ZeroRedundancyOptimizer: each rank keeps the state of its share of the parameters.

With data parallelism all ranks would compute the same update from the same state.  So each does it for some
parameters, and sends the result to the others.  This is the first stage of Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (2020); the interface is that of torch's class of the
same name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...common.copy_refusal import refuses_copies
from ...common.keywords import misspelt
from ...errors import GroupError, UsageError
from ...group import ProcessGroup
from ...group.group_argument import given_group, has_default_group
from ...group.regroup import Leader
from ..consistency import check_same
from ..join import Join, Joinable, JoinHook, takes_named_options
from .arguments import DIFFER, check_can_be_sent, check_copies, checked_parameters, describe_all
from .checkpoint import PER_PARAMETER, gather_state, packed, part_of_group, part_of_state
from .shares import Shares
from .survey import Gathers, gather_again

#: arguments of the constructor that are not for the optimiser inside
_ARGUMENTS = (
    "params", "optimizer_class", "group", "parameters_as_bucket_view", "overlap_with_ddp", "copies",
)  # fmt: skip


@refuses_copies(
    "a ZeroRedundancyOptimizer",
    "a part of the state of its group",
    "Call consolidate_state_dict() on all ranks and save or copy state_dict()",
)
class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimiser whose state is distributed over ranks that train the same model.

        model = shoal.DistributedDataParallel(net, group=group)
        optimizer = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, group=group, lr=1e-3)

    Each parameter has an owner, which keeps its state and computes its update; then all owners send their
    parameters to everybody.  The result is that of ``optimizer_class`` without distribution, bit for bit, as
    long as gradients are the same on all ranks (DistributedDataParallel sees to that), and it is the same on
    all ranks in any case.

    All ranks make it with the same arguments, which they compare, and call :meth:`step`,
    :meth:`add_param_group` and :meth:`consolidate_state_dict` together.  Everything else is as with any
    optimiser: parameter groups, learning rate schedulers, closures, hooks, ``zero_grad``.

    Args:
        params: as for any optimiser: tensors, pairs of name and tensor, or dictionaries for groups.
        optimizer_class: of the optimiser inside.  One that treats each parameter by itself, as all of
            ``torch.optim`` do but LBFGS.
        group: the ranks: a :class:`~shoal.ProcessGroup`, or a group of torch.distributed over the backend
            "shoal"; None: the default group of ``torch.distributed`` or ``shoal.distributed``; if there is
            none, and several copies are kept, that of the ``elastic.Session`` that will train with it.
        parameters_as_bucket_view: make the parameters views of one piece of memory that the whole group on
            this host can see: one message a rank.  Their values do not change, but their ``data`` does.
        overlap_with_ddp: update parameters while backward still runs, in a communication hook that
            ``shoal.parallel.hooks.hook_with_zero_step`` makes.  :meth:`step` has nothing left to do then.
        copies: how many ranks, on different hosts where there are several, keep the state of a parameter and
            compute its update.  Nothing more is sent; it needs gradients that are equal on all ranks.
        defaults: for ``optimizer_class``.

    Attributes:
        group: the ranks, now.
        optim: the optimiser inside, which has only this rank's parameters.
        state: its state.
        overlap_with_ddp, copies: as given.

    Raises:
        UsageError: there is no parameter, or what is given is none; or there cannot be so many copies.
        ModelMismatch: the ranks gave other parameters or options; the message says which.
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
        if "process_group" in defaults:
            raise misspelt("ZeroRedundancyOptimizer", ["process_group"], _ARGUMENTS)
        given = checked_parameters(params, optimizer_class)
        ranks = None
        if group is not None or copies == 1 or has_default_group():
            ranks = given_group(group, "ZeroRedundancyOptimizer")
        if overlap_with_ddp and parameters_as_bucket_view:
            raise UsageError(
                "with overlap_with_ddp=True parameters travel with the buckets of gradients; leave "
                "parameters_as_bucket_view out"
            )
        check_copies(copies, None if ranks is None else ranks.size, overlap_with_ddp=overlap_with_ddp)
        self.overlap_with_ddp = overlap_with_ddp
        self.copies = copies
        #: Whether a hook updates parameters in backward.
        self.hooked = False
        self._shares = Shares(ranks, copies, as_views=parameters_as_bucket_view, sends=not overlap_with_ddp)
        self._leader: Leader | None = None
        self._gathers = Gathers()
        #: how many calls that gather states are done already, because other ranks had begun them
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
        self._shares.add(_parameters(self.param_groups))
        self.optim = optimizer_class([self._own_part(group) for group in self.param_groups], **defaults)
        self.defaults = self.optim.defaults
        self.state = self.optim.state
        _copy_options(self.optim.param_groups, self.param_groups)
        self._made = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters that this rank owns, and get the others.  Collective.

        Args:
            closure: computes the loss again, with its gradients; on all ranks.
            kwargs: for the step of the optimiser inside.

        Returns:
            What the step of the optimiser inside gives: the loss of ``closure``.
        """
        Join.notify_join_context(self)
        if self.overlap_with_ddp:
            return self._step_in_backward(closure)
        self._shares.check_group()
        self.prepare_step()
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure, **kwargs)
        _copy_options(self.optim.param_groups, self.param_groups)
        self._shares.updated()
        while not self._shares.is_whole:
            with self._going_on():
                if self._shares.is_settled:
                    self._shares.exchange()
                else:
                    self._settle_with_others()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters.  Collective: all ranks add the same.  Those there are keep their owners."""
        if self._made:
            self._settle_with_others()
        super().add_param_group(param_group)
        if not self._made:
            return  # by the constructor, which distributes all groups together
        index = len(self.param_groups) - 1
        try:
            self._check_same(index, {})
        except BaseException:
            del self.param_groups[index]
            raise
        self._consolidated = None
        added = self.param_groups[index:]
        self._shares.add(_parameters(added))
        self.optim.add_param_group(self._own_part(added[0]))
        _copy_options(self.optim.param_groups, self.param_groups)

    # -- checkpoints -----------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state of all ranks to one, in CPU memory, for :meth:`state_dict` there.  Collective.

        It lives until the next step.

        Args:
            to: the rank.
        """
        if not 0 <= to < self.group.size:
            raise UsageError(f"to={to!r} is no rank of {self.group!r}")
        if self._gathered:
            self._gathered -= 1
            return
        self._gathers = Gathers(self._gathers.begun + 1, to, under_way=True)
        try:
            while self._gathers.under_way:
                with self._going_on():
                    self._settle_with_others()
                    if self._gathers.under_way:
                        self._gather(to)
        finally:
            self._gathers = self._gathers._replace(under_way=False)

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, as the optimiser inside would give it if there was only one rank.

        Raises:
            UsageError: it was not consolidated on this rank since the last step.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = self._consolidated
        if result is None and all(map(self._shares.is_own, _parameters(self.param_groups))):
            result = packed(self._own_state(self._shares.is_own), self.param_groups)
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
        """Load a state of all parameters, of which this rank keeps its part.  Each rank by itself.

        Args:
            state_dict: from :meth:`state_dict` on any number of ranks, or from the optimiser inside alone.

        Raises:
            UsageError: it is of other parameter groups.
        """
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, loaded)
            if changed is not None:
                loaded = changed
        self._consolidated = None
        self._shares.prepare_load(self.param_groups, self.optim)
        self.optim.load_state_dict(part_of_state(loaded, self.param_groups, self._shares.is_own))
        self.state = self.optim.state
        _copy_options(self.optim.param_groups, self.param_groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # -- another group -----------------------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return self._shares.group

    @property
    def present_group(self) -> ProcessGroup | None:
        """The ranks; None: a session has not given them yet."""
        return self._shares.group if self._shares.has_group else None

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all parameters as the newest update has left them."""
        return self._shares.is_whole

    def check_regroup(self) -> None:
        """Find out whether :meth:`regroup` can work.

        Raises:
            UsageError: there is only one copy of the state.
        """
        if self.copies == 1:
            raise UsageError(
                "this ZeroRedundancyOptimizer cannot follow another group: it keeps each part of its state "
                "on one rank, and that part dies with the rank.  Make it with copies=2"
            )

    def regroup(self, group: ProcessGroup) -> None:
        """Work over ``group`` from now on.  Every rank of it calls this; nothing is sent before
        :meth:`settle`.

        Args:
            group: of ranks that have had the group before, or of any that have this optimiser of the same
                parameters, also without any state.

        Raises:
            UsageError: as of :meth:`check_regroup`.
        """
        self.check_regroup()
        self._shares.move_to(group)

    def settle(self) -> None:
        """Bring parameters and state in order, if the group is new.

        Collective: every rank calls it at a point of the program at which it has called :meth:`step` as
        often as the others; otherwise the end of the next :meth:`step` does it, or whatever needs the state.
        Owners keep their state, and what has fewer owners than ``copies`` is sent to the rank that has least.
        If an exchange of parameters broke, it is done again.  A rank that has computed fewer steps counts as
        one without a state.

        Raises:
            GroupError: a rank is lost; call it again after the next :meth:`regroup`.
            StateLost: all owners of a parameter are lost.
            StateDiverged: the owners of a parameter have different states.
            ModelMismatch: the ranks have different parameters.
        """
        if self._shares.is_settled:
            return
        holdings = self._shares.settle(self.param_groups, self.optim, self._settings, self._gathers)
        again = gather_again(holdings)
        if again is not None and again.to < self.group.size:
            self._gather(again.to)
        last = max(each.gathers for each in holdings)._replace(under_way=False)
        if holdings[self.group.rank].steps == self._shares.steps:  # else it has joined the others
            self._gathered += last.begun - self._gathers.begun
        self._gathers = last

    def follow(self, leader: Leader | None) -> None:
        """Let :meth:`step` and :meth:`consolidate_state_dict` go on when a rank is lost in them.

        Args:
            leader: makes a new group then.  None: raise again.
        """
        self._leader = leader

    def hold_nothing(self) -> None:
        """What this rank has is not that of the ranks of the next group: it takes everything from them."""
        self._shares.steps = -1

    def take_over(self, common: Mapping[str, Any]) -> None:
        """Become what :meth:`what_all_have` has given elsewhere; :meth:`settle` does the rest.

        Raises:
            ValueError: it has other groups.
        """
        _copy_options(common["param_groups"], self.param_groups)

    def what_all_have(self) -> dict[str, Any]:
        """What is to be equal on all ranks: how many steps there were, and the options."""
        groups = [{**group, "params": len(group["params"])} for group in self.param_groups]
        return {"steps": self._shares.steps, "param_groups": groups}

    # -- for hooks that update parameters in backward -----------------------------------------------

    def prepare_step(self) -> None:
        """Let the optimiser inside know what schedulers and users changed."""
        self._consolidated = None
        _copy_options(self.param_groups, self.optim.param_groups)

    def owner(self, parameter: torch.Tensor) -> int | None:
        """The rank that updates and sends ``parameter``, or None if it is none of this optimiser's."""
        return self._shares.owner(parameter)

    def _step_in_backward(self, closure: Callable[[], Any] | None) -> Any:
        if not self.hooked:
            raise UsageError(
                "with overlap_with_ddp=True parameters are updated in backward, by a hook that is missing: "
                "model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))"
            )
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    # -- as a Joinable ---------------------------------------------------------------------------

    @takes_named_options
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Takes part in the steps of the others, with the gradients that they have."""
        return _ZeroHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks."""
        return self.group

    # -- inside ------------------------------------------------------------------------------------

    def _gather(self, to: int) -> None:
        """Bring the state of all ranks to one.  Collective."""
        self._consolidated = None
        # One of its owners sends the state of a parameter.
        state = gather_state(self.group, self._own_state(self._shares.is_sent_from_here), to)
        if state is not None:
            _copy_options(self.param_groups, self.optim.param_groups)
            self._consolidated = packed(state, self.param_groups)
        self._gathers = self._gathers._replace(under_way=False)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Do not raise the error of a lost rank if who follows the group goes on without it."""
        try:
            yield
        except GroupError as error:
            if self._leader is None or not self._leader.goes_on(error):
                raise

    def _settle_with_others(self) -> None:
        """Settle, with what else is new in the group."""
        if not self._shares.is_settled and self._leader is not None:
            self._leader.settle()
        else:
            self.settle()

    def _own_part(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return part_of_group(group, self._shares.is_own)

    def _own_state(self, chosen: Callable[[torch.Tensor], bool]) -> dict[Any, Any]:
        """The state of the ``chosen`` ones of this rank's parameters, by their numbers among all."""
        own = [
            (number, parameter)
            for number, parameter in enumerate(_parameters(self.param_groups))
            if self._shares.is_own(parameter)
        ]
        state = self.optim.state_dict()["state"]
        return {
            own[key][0] if isinstance(key, int) else key: value
            for key, value in state.items()
            if not isinstance(key, int) or chosen(own[key][1])
        }

    def _check_same(self, first: int, settings: Mapping[str, str]) -> None:
        """Raise on every rank unless all have the same groups, from the ``first`` one on.  Collective.

        Where there is no group yet, :meth:`settle` does it.
        """
        if not self._shares.has_group:
            return
        check_same(self.group, DIFFER, describe_all(self.param_groups[first:], settings, first))
        check_can_be_sent(self.param_groups[first:], first)


class _ZeroHook(JoinHook):
    """A rank that has run out still owns parameters, which the others train on."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.step()


def _parameters(groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Learning rates and the like, which schedulers and users change in our groups, not in those inside."""
    for given, taken in zip(source, target, strict=True):
        for name, value in given.items():
            if name not in PER_PARAMETER:
                taken[name] = value
