"""The survey of the state on the ranks of a new group, and the transfer of state to new owners.

Nothing is derived from owners in the previous group: an exchange of state there may have completed on some
ranks and failed on others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import StateDiverged, StateLost
from ...future import Future
from ...group import ProcessGroup
from .checkpoint import dumped, loaded
from .partition import Partition

#: The tag of messages with state for a new owner.
_TAG = 0x2E5A45B1

#: Maximum number of parameters named in an error.
_MAX_NAMES_SHOWN = 5


class Gathers(NamedTuple):
    """A rank's progress in gathering states for checkpoints.

    Attributes:
        begun: number of gathers that it has started.
        to: the destination rank of the last gather.
        under_way: whether the last gather has not completed.
    """

    begun: int = 0
    to: int = 0
    under_way: bool = False


class Holding(NamedTuple):
    """The state on one rank.

    Attributes:
        steps: number of updates that it has computed.
        is_whole: whether it has the updated parameters of all other owners.
        states: digests of the states of the parameters that it owns, by parameter number.
        trained: for each parameter, whether it is not frozen.
        form: a digest of the description that must be equal on all ranks.
        gathers: its progress in gathering states.
    """

    steps: int
    is_whole: bool
    states: Mapping[int, bytes]
    trained: Sequence[bool]
    form: bytes
    gathers: Gathers


def holders(holdings: Sequence[Holding], names: Sequence[str]) -> list[list[int]]:
    """Return for each parameter the ranks that have its newest state.

    Args:
        holdings: the holdings of all ranks.
        names: names of the parameters, for errors.

    Raises:
        StateLost: no rank has the state of a parameter.
        StateDiverged: owners of a parameter have different states.
    """
    newest = max(each.steps for each in holdings)
    held: list[list[int]] = [[] for _ in names]
    for rank, each in enumerate(holdings):
        if each.steps == newest:
            for number in each.states:
                held[number].append(rank)
    lost = [name for name, ranks in zip(names, held, strict=True) if not ranks]
    if lost:
        raise StateLost(
            f"the optimiser's state of {_some(lost)} is lost with all its owners, after {newest} steps.  "
            "Load a checkpoint, in a new session; with larger copies= more simultaneous failures are survived"
        )
    for number, ranks in enumerate(held):
        for rank in ranks[1:]:
            if holdings[rank].states[number] != holdings[ranks[0]].states[number]:
                raise StateDiverged(
                    f"ranks {ranks[0]} and {rank} own {names[number]}, and have different states of it after "
                    f"{newest} steps: all owners need the same gradients, options and checkpoint"
                )
    return held


def gather_again(holdings: Sequence[Holding]) -> Gathers | None:
    """Return the gather that some ranks have started or completed and others not; None: there is none.

    All ranks must then take part in it, and those that have not started it skip their own later call.
    """
    newest = max(each.steps for each in holdings)
    known = [each.gathers for each in holdings if each.steps == newest]
    last = max(known)
    if any(each.under_way for each in known) or any(each.begun < last.begun for each in known):
        return last
    return None


def are_whole(holdings: Sequence[Holding]) -> bool:
    """Whether all ranks have all parameters of the newest update."""
    return all(each.is_whole and each.steps == holdings[0].steps for each in holdings)


def moves(
    partition: Partition, parameters: Sequence[torch.Tensor], held: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    """Return the state to send to owners: (parameter number, sending rank, receiving rank)."""
    return [
        (number, partition.owners(parameter)[0], rank)
        for number, parameter in enumerate(parameters)
        for rank in partition.owners(parameter)
        if rank not in held[number]
    ]


def move(
    group: ProcessGroup,
    planned: Sequence[tuple[int, int, int]],
    parameters: Sequence[torch.Tensor],
    state: Mapping[torch.Tensor, Any],
) -> dict[int, Any]:
    """Send and receive state as ``planned`` by :func:`moves`.  Collective.

    Returns the received states by parameter number, None for a parameter without state.
    """
    sent: list[Future[Any]] = []
    for number, sender, receiver in planned:
        if sender == group.rank:
            structure, tensors = dumped(state.get(parameters[number]))
            strides = [torch.empty_like(x, device="meta").stride() for x in tensors]  # dense ones
            forms = [(tuple(x.shape), stride, x.dtype) for x, stride in zip(tensors, strides, strict=True)]
            on_cpu = [x.is_cpu for x in tensors]
            sent.append(group.send_object((structure, forms, on_cpu), receiver, tag=_TAG))
            sent += [group.send(x, receiver, tag=_TAG) for x in tensors]
    received: dict[int, Any] = {}
    for number, sender, receiver in planned:
        if receiver == group.rank:
            structure, forms, on_cpu = group.recv_object(sender, tag=_TAG).wait()
            device = parameters[number].device
            tensors = [
                torch.empty_strided(shape, stride, dtype=dtype, device="cpu" if here else device)
                for (shape, stride, dtype), here in zip(forms, on_cpu, strict=True)
            ]
            for arrival in [group.recv(x, src=sender, tag=_TAG) for x in tensors]:
                arrival.wait()
            received[number] = loaded(structure, tensors)
    for message in sent:
        message.wait()
    return received


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return (
        shown
        if len(names) <= _MAX_NAMES_SHOWN
        else f"{shown} and {len(names) - _MAX_NAMES_SHOWN} more parameters"
    )
