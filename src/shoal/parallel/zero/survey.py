"""What the ranks of a new group say they hold, what follows for who owns what, and the state on its way.

Nothing is concluded from the group before: a rank may have taken over state there, or given it away, in an
exchange that broke for another one.
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

#: The tag of messages that carry state to a new owner.
_TAG = 0x2E5A45B1

#: how many parameters an error names
_NAMED = 5


class Gathers(NamedTuple):
    """How far a rank has come in gathering states for checkpoints.

    Attributes:
        begun: how many times it has begun.
        to: the rank that the last one was for.
        under_way: whether it waits for the last one.
    """

    begun: int = 0
    to: int = 0
    under_way: bool = False


class Holding(NamedTuple):
    """What one rank holds.

    Attributes:
        steps: how many updates it has computed.
        is_whole: whether it has the updated parameters of all others.
        states: the parameters that it owns, by number, with a digest of the state of each.
        trained: of each parameter, whether it is not frozen.
        form: a digest of what must be equal on all ranks.
        gathers: how far it has come in gathering states.
    """

    steps: int
    is_whole: bool
    states: Mapping[int, bytes]
    trained: Sequence[bool]
    form: bytes
    gathers: Gathers


def holders(holdings: Sequence[Holding], names: Sequence[str]) -> list[list[int]]:
    """For each parameter the ranks whose state of it is the newest.

    Args:
        holdings: of all ranks.
        names: of the parameters, for errors.

    Raises:
        StateLost: nobody has the state of a parameter.
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
            "Load a checkpoint, in a new session; more copies= outlive more deaths at once"
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
    """The gathering that some ranks have begun or ended and others not; None: there is none.

    Every rank takes part in it now, and those that have not begun it pass over their own call.
    """
    newest = max(each.steps for each in holdings)
    known = [each.gathers for each in holdings if each.steps == newest]
    last = max(known)
    if any(each.under_way for each in known) or any(each.begun < last.begun for each in known):
        return last
    return None


def are_whole(holdings: Sequence[Holding]) -> bool:
    """Whether all ranks have all parameters as the newest update has left them."""
    return all(each.is_whole and each.steps == holdings[0].steps for each in holdings)


def moves(
    partition: Partition, parameters: Sequence[torch.Tensor], held: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    """The state that owners lack: the number of a parameter, the rank that sends, the one that receives."""
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
    """Send and receive state.  Collective.

    Args:
        planned: what :func:`moves` gives.
        state: of this rank's parameters.

    Returns:
        What this rank has received, by the numbers of parameters; None where there is no state yet.
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
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more parameters"
