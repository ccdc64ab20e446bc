"""Exchanging the outcome of a pass: whether it went well on all ranks.

``cpp/reducer/outcome.h`` describes the two encodings.  The tail of the last bucket costs no message, but the
host has to read it at the end of the pass; where the buckets are on a device that has streams, the host would
wait for the device there.  So the outcome then takes a message of its own, from the memory of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...future import Future
from ...group import ProcessGroup
from ...spec import MAX
from ...streams import device_tensors
from ..core import Pass


class OutcomeExchange:
    """Carries what ``passes`` says of this rank's pass to the other ranks, and their answers back.

    Args:
        parameters: how many the model has.
    """

    def __init__(self, group: ProcessGroup, passes: Pass, parameters: int) -> None:
        self._group = group
        self._pass = passes
        self._flags = group.empty(3 + parameters, dtype=torch.uint8)
        self._future: Future[torch.Tensor] | None = None
        self._tail = torch.empty(0, device="cpu")

    def use_tail(self, tail: torch.Tensor, *, allowed: bool) -> None:
        """Take ``tail`` where the outcome may travel with the last bucket.

        Args:
            tail: elements of a bucket, all zeros; empty if no bucket has any.
            allowed: averages of the bucket are plain means of all its elements.
        """
        self._tail = tail.real  # a view, also of complex numbers
        on_device = next(device_tensors(tail), None) is not None
        self._pass.separate = not allowed or on_device or not tail.numel()

    def write_tail(self) -> None:
        """Write this rank's report into the tail.  A rank whose tail holds zeros says that all is well."""
        self._tail.copy_(torch.tensor(self._pass.tail(), dtype=torch.float64, device="cpu"))

    def send_flags(self, present: Sequence[bool]) -> None:
        """Start the exchange of flags.  Collective.

        Args:
            present: the parameters that have a gradient from earlier passes.
        """
        self._flags.copy_(torch.tensor(self._pass.flags(present), dtype=torch.uint8, device="cpu"))
        self._future = self._group.all_reduce(self._flags, op=MAX)

    def wait(self) -> None:
        """Give the answers of all ranks to the pass; the buckets have been waited for."""
        if self._pass.separate:
            assert self._future is not None
            self._pass.decode_flags(self._future.wait().tolist())
            self._future = None
            return
        mean = self._tail.tolist()
        self._pass.decode_tail(mean, torch.finfo(self._tail.dtype).eps)
        if any(mean):
            self._tail.zero_()
