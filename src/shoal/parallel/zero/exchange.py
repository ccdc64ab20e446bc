"""Sending updated parameters from their owners to all other ranks.

All ranks broadcast their parameters concurrently and in place: each byte is copied once per receiving rank,
in registered memory or not.  (With 2 ranks and 40 MB an all-gather into registered memory took six times as
long, because its input must not be part of its output, and so did copies into and out of registered memory.)
Only small parameters are copied, into one message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ..coalesced import by_device, packed_size

#: Parameters of fewer bytes are sent in one message: copying this many bytes costs as much as a message.
SMALL_BYTES = 2**15


class Exchange:
    """Sends parameters of any dtypes from their owners to all ranks.

    Args:
        parameters: the same on all ranks, in the same order.
        owners: for each of ``parameters`` the rank that has the current values.
        as_views: make all parameters views of registered memory: no copies, and one message for each owner.
    """

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[torch.Tensor],
        owners: Sequence[int],
        *,
        as_views: bool,
    ) -> None:
        self._group = group
        self._as_views = as_views
        small = [x for x in parameters if as_views or packed_size(x) < SMALL_BYTES]
        owner_of = {id(parameter): owner for owner, parameter in zip(owners, parameters, strict=True)}
        portions = [
            sorted(((owner_of[id(x)], x) for x in some), key=lambda pair: pair[0])
            for some in by_device(small)
        ]
        together = [pair for portion in portions for pair in portion]
        self._packed = [parameter for _, parameter in together]
        packed = set(self._packed)
        self._single = [pair for pair in zip(owners, parameters, strict=True) if pair[1] not in packed]
        self._mine = [owner == group.rank for owner, _ in together]
        self._received = [
            parameter for owner, parameter in zip(owners, parameters, strict=True) if owner != group.rank
        ]
        self._views: list[torch.Tensor] = []
        self._messages: list[tuple[int, torch.Tensor]] = []
        for portion in portions:
            views, messages = _pack(group, portion)
            self._views += views
            self._messages += messages
        self._sent: list[Future[torch.Tensor]] = []
        if as_views:
            self._adopt()

    def start(self) -> None:
        """Start to overwrite the parameters of other owners with their values.  Collective."""
        with torch.no_grad():
            if self._as_views:
                self._adopt()
            else:
                self._copy(mine=True)
        self._sent = [self._group.broadcast(message, root=owner) for owner, message in self._messages]
        self._sent += [
            self._group.broadcast(parameter.detach(), root=owner) for owner, parameter in self._single
        ]

    def finish(self) -> None:
        """Wait for the exchange."""
        sent, self._sent = self._sent, []
        for future in sent:
            future.wait(blocking=False)
        with torch.no_grad():
            if not self._as_views:
                self._copy(mine=False)
            # Autograd did not record the writes; a backward pass with saved old values must fail.
            torch.autograd.graph.increment_version(self._received)

    def _copy(self, *, mine: bool) -> None:
        """Copy this rank's parameters into the messages (``mine``), or the other parameters out of them."""
        chosen = [index for index, own in enumerate(self._mine) if own is mine]
        if not chosen:
            return
        views, parameters = [self._views[i] for i in chosen], [self._packed[i] for i in chosen]
        torch._foreach_copy_(*((views, parameters) if mine else (parameters, views)))

    def _adopt(self) -> None:
        """Make all parameters views of the messages, also after their ``data`` was replaced."""
        for view, parameter in zip(self._views, self._packed, strict=True):
            if parameter.data_ptr() == view.data_ptr():
                continue
            if parameter.dtype != view.dtype or parameter.shape != view.shape:
                raise UsageError(
                    f"rank {self._group.rank}: a parameter was {view.dtype} {list(view.shape)} when the "
                    f"optimiser was made and is {parameter.dtype} {list(parameter.shape)} now; convert the "
                    "model before making the optimiser"
                )
            view.copy_(parameter.detach())
            parameter.data = view


class Portion:
    """Parameters that were added together, and their exchange."""

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[torch.Tensor],
        owners: Sequence[int],
        *,
        as_views: bool,
    ) -> None:
        self._group = group
        self._parameters = parameters
        self._owners = owners
        self._as_views = as_views
        self._trained: list[bool] = []
        self._exchange: Exchange | None = None
        self._prepare()

    def start(self) -> None:
        """Start to send the trained parameters.  Collective."""
        self._prepare()
        if self._exchange is not None:
            self._exchange.start()

    def finish(self) -> None:
        """Wait for the exchange."""
        if self._exchange is not None:
            self._exchange.finish()

    def _prepare(self) -> None:
        """Make a new exchange if other parameters are trained than before (layers may be unfrozen)."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if self._group.size == 1 or trained == self._trained:
            return
        self._trained = trained
        self._exchange = Exchange(
            self._group,
            [parameter for parameter, needed in zip(self._parameters, trained, strict=True) if needed],
            [owner for owner, needed in zip(self._owners, trained, strict=True) if needed],
            as_views=self._as_views,
        )


def _pack(
    group: ProcessGroup, together: Sequence[tuple[int, torch.Tensor]]
) -> tuple[list[torch.Tensor], list[tuple[int, torch.Tensor]]]:
    """Allocate registered memory for parameters of one device, sorted by owner.

    Returns a view of the memory for each parameter, and the bytes of each owner.
    """
    ends = [0] * (group.size + 1)
    offsets = []
    end = 0
    for owner, parameter in together:
        offsets.append(end)
        end += packed_size(parameter)
        ends[owner + 1] = end
    memory = group.empty(end, dtype=torch.uint8, device=together[0][1].device)
    memory.zero_()  # the gaps are sent too
    views = [
        _view(memory, offset, parameter) for offset, (_, parameter) in zip(offsets, together, strict=True)
    ]
    messages = []
    for owner in range(group.size):
        ends[owner + 1] = max(ends[owner + 1], ends[owner])
        if ends[owner + 1] > ends[owner]:
            messages.append((owner, memory[ends[owner] : ends[owner + 1]]))
    return views, messages


def _view(memory: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    nbytes = parameter.numel() * parameter.element_size()
    flat = memory[offset : offset + nbytes].view(parameter.dtype)
    # The parameter's strides (channels_last, for example), or those of a dense copy if it has holes.
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides)
