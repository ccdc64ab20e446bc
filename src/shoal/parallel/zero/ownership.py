"""The owners of the parameters of a distributed optimiser in the current group, and of their state.

In a new group all ranks exchange what state they have, choose owners, and send state to new owners.  Nothing
is derived from owners in the previous group: an exchange of state there may have completed on some ranks and
failed on others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...common.formatting import shortened
from ...errors import StateDiverged, StateLost, UsageError
from ...future import Future
from ...group import ProcessGroup
from ..consistency import Digest, check_same
from .arguments import MISMATCH, describe, named_parameters
from .checkpoint import PER_PARAMETER, STATE_TAG, pack_state, part_of_group, receive_state
from .exchange import Exchange, ParameterExchange
from .partition import Partition, partition_of

#: Maximum number of parameters named in an error.
_MAX_NAMES_SHOWN = 5


class GatherProgress(NamedTuple):
    """A rank's progress in gathering states for checkpoints."""

    begun: int = 0  # number of gathers that it has started
    to: int = 0  # the destination rank of the last gather
    is_running: bool = False  # whether the last gather has not completed


class RankState(NamedTuple):
    """The state on one rank."""

    steps: int  # number of updates that it has computed
    has_all_parameters: bool  # whether it has the updated parameters of all other owners
    states: Mapping[int, bytes]  # digests of the states of the parameters that it owns, by parameter number
    trained: Sequence[bool]  # for each parameter, whether it is not frozen
    form: bytes  # a digest of the description that must be equal on all ranks
    gather_progress: GatherProgress  # its progress in gathering states


def holders(rank_states: Sequence[RankState], names: Sequence[str]) -> list[list[int]]:
    """Return for each parameter the ranks that have its newest state.

    Raises:
        StateLost: no rank has the state of a parameter.
        StateDiverged: owners of a parameter have different states.
    """
    newest = max(each.steps for each in rank_states)
    held: list[list[int]] = [[] for _ in names]
    for rank, each in enumerate(rank_states):
        if each.steps == newest:
            for number in each.states:
                held[number].append(rank)
    lost = [name for name, ranks in zip(names, held, strict=True) if not ranks]
    if lost:
        some = shortened(lost, _MAX_NAMES_SHOWN, "more parameters")
        raise StateLost(
            f"the optimiser's state of {some} is lost with all its owners, after {newest} steps.  "
            "Load a checkpoint, in a new session; with larger copies= more simultaneous failures are survived"
        )
    for number, ranks in enumerate(held):
        for rank in ranks[1:]:
            if rank_states[rank].states[number] != rank_states[ranks[0]].states[number]:
                raise StateDiverged(
                    f"ranks {ranks[0]} and {rank} own {names[number]}, and have different states of it after "
                    f"{newest} steps: all owners need the same gradients, options and checkpoint"
                )
    return held


def unfinished_gather(rank_states: Sequence[RankState]) -> GatherProgress | None:
    """Return the gather that some ranks have started or completed and others not; None: there is none.

    All ranks must then take part in it, and those that have not started it skip their own later call.
    """
    newest = max(each.steps for each in rank_states)
    known = [each.gather_progress for each in rank_states if each.steps == newest]
    last = max(known)
    if any(each.is_running for each in known) or any(each.begun < last.begun for each in known):
        return last
    return None


def all_have_parameters(rank_states: Sequence[RankState]) -> bool:
    """Whether all ranks have all parameters of the newest update."""
    return all(each.has_all_parameters and each.steps == rank_states[0].steps for each in rank_states)


def plan_transfers(
    partition: Partition, parameters: Sequence[torch.Tensor], held: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    """Return the state to send to owners: (parameter number, sending rank, receiving rank)."""
    return [
        (number, partition.owners(parameter)[0], rank)
        for number, parameter in enumerate(parameters)
        for rank in partition.owners(parameter)
        if rank not in held[number]
    ]


def transfer_state(
    group: ProcessGroup,
    planned: Sequence[tuple[int, int, int]],
    parameters: Sequence[torch.Tensor],
    state: Mapping[torch.Tensor, Any],
) -> dict[int, Any]:
    """Send and receive state as ``planned`` by :func:`plan_transfers`.  Collective.

    Returns the received states by parameter number, None for a parameter without state.
    """
    sent: list[Future[Any]] = []
    for number, sender, receiver in planned:
        if sender == group.rank:
            header, tensors = pack_state(state.get(parameters[number]))
            sent.append(group.send_object(header, receiver, tag=STATE_TAG))
            sent += [group.send(x, receiver, tag=STATE_TAG) for x in tensors]
    received: dict[int, Any] = {}
    for number, sender, receiver in planned:
        if receiver == group.rank:
            header = group.recv_object(sender, tag=STATE_TAG).wait()
            received[number] = receive_state(group, header, sender, parameters[number].device)
    for message in sent:
        message.wait()
    return received


class Ownership:
    """The owners of all parameters, and the exchange of updated parameters.

    Args:
        group: None: it is set later, and this rank owns all parameters until then.
        copies: number of owners of a parameter.
        as_views: see :class:`Exchange`.
        sends: whether to exchange parameters here; False: a hook does it.
    """

    def __init__(self, group: ProcessGroup | None, copies: int, *, as_views: bool, sends: bool) -> None:
        self.steps = 0  # number of updates that this rank has computed
        self.is_settled = True  # whether settle() has completed in the current group
        self.has_all_parameters = True  # those of other owners after the latest update
        self.present_group = group  # None: not set yet
        self._copies = copies
        self._as_views = as_views
        self._sends = sends
        self._partition = Partition(1) if group is None else partition_of(group, copies)
        self._own: set[torch.Tensor] = set()
        self._exchanges: list[ParameterExchange] = []

    @property
    def group(self) -> ProcessGroup:
        """The group."""
        self.check_group()
        assert self.present_group is not None
        return self.present_group

    def check_group(self) -> None:
        """Raise UsageError if no session has set the group yet."""
        if self.present_group is None:
            raise UsageError(
                "this ZeroRedundancyOptimizer was made without a group, for the elastic.Session of a State "
                "that contains it; to use it elsewhere, pass a group: group=shoal.init()"
            )

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Assign more parameters to owners."""
        self._partition.add(parameters)
        rank = 0 if self.present_group is None else self.present_group.rank
        self._own.update(parameter for parameter in parameters if rank in self._partition.owners(parameter))
        if self.present_group is not None and self._sends:
            self._exchanges.append(self._new_exchange(self.present_group, parameters))

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
        self.has_all_parameters = False

    def exchange(self) -> None:
        """Send the updated parameters of all owners to all ranks.  Collective."""
        for portion in self._exchanges:
            portion.start()
        for portion in self._exchanges:
            portion.finish()
        self.has_all_parameters = True

    def move_to(self, group: ProcessGroup) -> None:
        """Use ``group`` from now on.  Nothing is sent before :meth:`settle`."""
        self.present_group = group
        self._exchanges = []
        self.is_settled = False

    def own_all_if_unsettled(self, groups: Sequence[dict[str, Any]], inner: torch.optim.Optimizer) -> None:
        """Prepare loading a whole state: while owners are not known, this rank owns all parameters."""
        if self.present_group is None or not self.is_settled:
            self._take(set(all_parameters(groups)), groups, inner)
            self.steps, self.has_all_parameters = 0, True

    def settle(
        self,
        groups: Sequence[dict[str, Any]],
        inner: torch.optim.Optimizer,
        settings: Mapping[str, str],
        gather_progress: GatherProgress,
    ) -> list[RankState]:
        """Assign owners in a new group, send missing parameters and state, return all states.  Collective.

        Ranks may call this at different points of the program, where options and frozen parameters differ.
        So decisions that depend on these use the exchanged states, and not the values of this rank.

        ``groups`` are all parameters, ``inner`` is the inner optimiser, with this rank's parameters, and
        ``settings`` are other values that must be equal on all ranks.
        """
        group = self.group
        parameters = all_parameters(groups)
        form = describe(groups, settings, shapes_only=True)
        mine = self._holding(parameters, inner, form, gather_progress)
        rank_states: list[RankState] = group.all_gather_object(mine).wait()
        if any(each.form != rank_states[0].form for each in rank_states):
            check_same(group, MISMATCH, form)
        held = holders(rank_states, [name for name, _ in named_parameters(groups)])
        self._partition = partition_of(group, self._copies)
        self._partition.add(parameters, held, rank_states[0].trained)
        if group.size > 1 and not all_have_parameters(rank_states):
            sent = [
                parameter
                for number, parameter in enumerate(parameters)
                if any(each.trained[number] for each in rank_states)
            ]
            exchange = Exchange(group, sent, self._senders(sent), as_views=False)
            exchange.start()
            exchange.finish()
        self.has_all_parameters = True
        self._exchanges = [self._new_exchange(group, parameters)]
        planned = plan_transfers(self._partition, parameters, held)
        received = transfer_state(group, planned, parameters, inner.state)
        for number, state in received.items():
            inner.state.pop(parameters[number], None)
            if state is not None:
                inner.state[parameters[number]] = state
        kept = {number for number, ranks in enumerate(held) if group.rank in ranks}
        self._take({parameters[number] for number in kept | received.keys()}, groups, inner)
        if planned:
            group.barrier().wait()  # no rank may drop state before its receivers have it
        own = {parameter for parameter in parameters if group.rank in self._partition.owners(parameter)}
        self._take(own, groups, inner)
        self.steps = max(each.steps for each in rank_states)
        self.is_settled = True
        return rank_states

    def _new_exchange(self, group: ProcessGroup, parameters: Sequence[torch.Tensor]) -> ParameterExchange:
        return ParameterExchange(group, parameters, self._senders(parameters), as_views=self._as_views)

    def _senders(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        return [self._partition.owner(parameter) or 0 for parameter in parameters]

    def _holding(
        self,
        parameters: Sequence[torch.Tensor],
        inner: torch.optim.Optimizer,
        form: Sequence[tuple[str, str]],
        gather_progress: GatherProgress,
    ) -> RankState:
        states = {}
        for number, parameter in enumerate(parameters):
            if parameter in self._own:
                of_state = Digest()
                of_state.add("", inner.state.get(parameter, {}))
                states[number] = of_state.value()[:8]
        trained = [parameter.requires_grad for parameter in parameters]
        digest = hashlib.sha256(repr(form).encode()).digest()
        return RankState(self.steps, self.has_all_parameters, states, trained, digest, gather_progress)

    def _take(
        self, own: set[torch.Tensor], groups: Sequence[dict[str, Any]], inner: torch.optim.Optimizer
    ) -> None:
        """Own exactly these parameters from now on, and pass them to the inner optimiser."""
        for parameter in self._own - own:
            inner.state.pop(parameter, None)
        self._own = own
        for group, inner_group in zip(groups, inner.param_groups, strict=True):
            part = part_of_group(group, self.is_own)
            inner_group.update({name: part[name] for name in PER_PARAMETER if name in part})


def all_parameters(groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in groups for parameter in group["params"]]
