"""This rank's share of a distributed optimiser in the current group."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import UsageError
from ...group import ProcessGroup
from ..consistency import check_same
from ..digest import Digest
from .arguments import DIFFER, describe_shapes, names_of
from .checkpoint import PER_PARAMETER, part_of_group
from .exchange import Exchange, Portion
from .partition import Partition, partition_of
from .survey import Gathers, Holding, are_whole, holders, move, moves


class Shares:
    """The owners of all parameters, and the exchange of updated parameters.

    Args:
        group: the group; None: it is set later, and this rank owns all parameters until then.
        copies: number of owners of a parameter.
        as_views: see :class:`Exchange`.
        sends: whether to exchange parameters here; False: a hook does it.

    Attributes:
        steps: number of updates that this rank has computed.
        is_settled: whether :meth:`settle` has completed in the current group.
        is_whole: whether this rank has the parameters of other owners after the latest update.
    """

    def __init__(self, group: ProcessGroup | None, copies: int, *, as_views: bool, sends: bool) -> None:
        self.steps = 0
        self.is_settled = True
        self.is_whole = True
        self._group = group
        self._copies = copies
        self._as_views = as_views
        self._sends = sends
        self._partition = Partition(1) if group is None else partition_of(group, copies)
        self._own: set[torch.Tensor] = set()
        self._portions: list[Portion] = []

    @property
    def has_group(self) -> bool:
        """Whether the group is set."""
        return self._group is not None

    @property
    def group(self) -> ProcessGroup:
        """The group."""
        self.check_group()
        assert self._group is not None
        return self._group

    def check_group(self) -> None:
        """Raise UsageError if no session has set the group yet."""
        if self._group is None:
            raise UsageError(
                "this ZeroRedundancyOptimizer was made without a group, for the elastic.Session of a State "
                "that contains it; to use it elsewhere, pass a group: group=shoal.init()"
            )

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Assign more parameters to owners."""
        self._partition.add(parameters)
        rank = 0 if self._group is None else self._group.rank
        self._own.update(parameter for parameter in parameters if rank in self._partition.owners(parameter))
        if self._group is not None and self._sends:
            self._portions.append(self._portion(self._group, parameters))

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Return the rank that sends ``parameter``; None: it was never added."""
        return self._partition.owner(parameter)

    def is_own(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps the state of ``parameter`` and updates it."""
        return parameter in self._own

    def is_sent_from_here(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the owner that sends ``parameter``."""
        return self._partition.owner(parameter) == self.group.rank

    def updated(self) -> None:
        """Note that this rank has computed an update."""
        self.steps += 1
        self.is_whole = False

    def exchange(self) -> None:
        """Send the updated parameters of all owners to all ranks.  Collective."""
        for portion in self._portions:
            portion.start()
        for portion in self._portions:
            portion.finish()
        self.is_whole = True

    def move_to(self, group: ProcessGroup) -> None:
        """Use ``group`` from now on.  Nothing is sent before :meth:`settle`."""
        self._group = group
        self._portions = []
        self.is_settled = False

    def prepare_load(self, groups: Sequence[dict[str, Any]], inside: torch.optim.Optimizer) -> None:
        """Prepare loading a whole state: while owners are not known, this rank owns all parameters."""
        if self._group is None or not self.is_settled:
            self._take(set(all_parameters(groups)), groups, inside)
            self.steps, self.is_whole = 0, True

    def settle(
        self,
        groups: Sequence[dict[str, Any]],
        inside: torch.optim.Optimizer,
        settings: Mapping[str, str],
        gathers: Gathers,
    ) -> list[Holding]:
        """Assign owners in a new group, and send missing parameters and state.  Collective.

        Ranks may call this at different points of the program, where options and frozen parameters differ.
        So decisions that depend on these use the exchanged holdings, and not the values of this rank.

        Args:
            groups: all parameters.
            inside: the inner optimiser, with this rank's parameters.
            settings: other values that must be equal on all ranks.
            gathers: this rank's progress in gathering states.

        Returns:
            The holdings of all ranks.
        """
        group = self.group
        parameters = all_parameters(groups)
        form = describe_shapes(groups, settings)
        mine = self._holding(parameters, inside, form, gathers)
        holdings: list[Holding] = group.all_gather_object(mine).wait()
        if any(each.form != holdings[0].form for each in holdings):
            check_same(group, DIFFER, form)
        names = [name for index, each in enumerate(groups) for name in names_of(each, index)]
        held = holders(holdings, names)
        self._partition = partition_of(group, self._copies)
        self._partition.add(parameters, held, holdings[0].trained)
        if group.size > 1 and not are_whole(holdings):
            sent = [
                parameter
                for number, parameter in enumerate(parameters)
                if any(each.trained[number] for each in holdings)
            ]
            exchange = Exchange(group, sent, self._senders(sent), as_views=False)
            exchange.start()
            exchange.finish()
        self.is_whole = True
        self._portions = [self._portion(group, parameters)]
        planned = moves(self._partition, parameters, held)
        received = move(group, planned, parameters, inside.state)
        for number, state in received.items():
            inside.state.pop(parameters[number], None)
            if state is not None:
                inside.state[parameters[number]] = state
        kept = {number for number, ranks in enumerate(held) if group.rank in ranks}
        self._take({parameters[number] for number in kept | received.keys()}, groups, inside)
        if planned:
            group.barrier().wait()  # no rank may drop state before its receivers have it
        own = {parameter for parameter in parameters if group.rank in self._partition.owners(parameter)}
        self._take(own, groups, inside)
        self.steps = max(each.steps for each in holdings)
        self.is_settled = True
        return holdings

    def _portion(self, group: ProcessGroup, parameters: Sequence[torch.Tensor]) -> Portion:
        return Portion(group, parameters, self._senders(parameters), as_views=self._as_views)

    def _senders(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        return [self._partition.owner(parameter) or 0 for parameter in parameters]

    def _holding(
        self,
        parameters: Sequence[torch.Tensor],
        inside: torch.optim.Optimizer,
        form: Sequence[tuple[str, str]],
        gathers: Gathers,
    ) -> Holding:
        states = {}
        for number, parameter in enumerate(parameters):
            if parameter in self._own:
                of_state = Digest()
                of_state.add("", inside.state.get(parameter, {}))
                states[number] = of_state.value()[:8]
        trained = [parameter.requires_grad for parameter in parameters]
        digest = hashlib.sha256(repr(form).encode()).digest()
        return Holding(self.steps, self.is_whole, states, trained, digest, gathers)

    def _take(
        self, own: set[torch.Tensor], groups: Sequence[dict[str, Any]], inside: torch.optim.Optimizer
    ) -> None:
        """Own exactly these parameters from now on, and pass them to the inner optimiser."""
        for parameter in self._own - own:
            inside.state.pop(parameter, None)
        self._own = own
        for group, its in zip(groups, inside.param_groups, strict=True):
            part = part_of_group(group, self.is_own)
            its.update({name: part[name] for name in PER_PARAMETER if name in part})


def all_parameters(groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in groups for parameter in group["params"]]
