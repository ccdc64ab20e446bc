"""Sending updated parameters from their owners to all other ranks.

All ranks broadcast their parameters concurrently and in place: each byte is copied once per receiving rank,
in registered memory or not.  (With 2 ranks and 40 MB an all-gather into registered memory took six times as
long, because its input must not be part of its output, and so did copies into and out of registered memory.)
Only small parameters are copied, into one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch

from ...errors import UsageError
from ...future import Future
from ...group import ProcessGroup
from ..coalesced import dense_view, packed_size

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
        self._single: list[tuple[int, torch.Tensor]] = []
        portions: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for pair in zip(owners, parameters, strict=True):
            parameter = pair[1]
            is_packed = as_views or packed_size(parameter) < SMALL_BYTES
            (portions.setdefault(parameter.device, []) if is_packed else self._single).append(pair)
        self._received = [x for owner, x in zip(owners, parameters, strict=True) if owner != group.rank]
        self._packed: list[tuple[int, torch.Tensor]] = []
        self._views: list[torch.Tensor] = []
        self._messages: list[tuple[int, torch.Tensor]] = []
        for portion in portions.values():
            portion.sort(key=itemgetter(0))
            views, messages = _pack(group, portion)
            self._packed += portion
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
        pairs = zip(self._views, self._packed, strict=True)
        chosen = [(view, x) for view, (owner, x) in pairs if (owner == self._group.rank) is mine]
        if chosen:
            views, parameters = map(list, zip(*chosen, strict=True))
            torch._foreach_copy_(*((views, parameters) if mine else (parameters, views)))

    def _adopt(self) -> None:
        """Make all parameters views of the messages, also after their ``data`` was replaced."""
        for view, (_, parameter) in zip(self._views, self._packed, strict=True):
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


class ParameterExchange:
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
    count = sum(packed_size(parameter) for _, parameter in together)
    memory = group.empty(count, dtype=torch.uint8, device=together[0][1].device)
    memory.zero_()  # the gaps are sent too
    views: list[torch.Tensor] = []
    messages: list[tuple[int, torch.Tensor]] = []
    start = 0
    for owner, pairs in groupby(together, key=itemgetter(0)):
        end = start
        for _, parameter in pairs:
            views.append(dense_view(memory.view(parameter.dtype), end, parameter))
            end += packed_size(parameter)
        if end > start:
            messages.append((owner, memory[start:end]))
        start = end
    return views, messages
