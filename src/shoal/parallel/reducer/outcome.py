"""The exchange of the outcome of a pass: whether it succeeded on all ranks.

``cpp/ddp/outcome.h`` describes the two encodings.  The tail of the last bucket needs no message, but the
host must read it at the end of the pass.  For buckets on a device with streams the host would have to wait
for the device, so the outcome is then sent in a separate message from host memory.
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
    """Exchanges the reports of ``passes``, for a number of ``parameters``, with the other ranks."""

    def __init__(self, group: ProcessGroup, passes: Pass, parameters: int) -> None:
        self._group = group
        self._pass = passes
        self._flags = group.empty(3 + parameters, dtype=torch.uint8)
        self._future: Future[torch.Tensor] | None = None
        self._tail = torch.empty(0, device="cpu")

    def use_tail(self, tail: torch.Tensor, *, allowed: bool) -> None:
        """Use ``tail``, zeros in the last bucket, for the outcome, if it is not empty and on the host.

        ``allowed`` tells whether averages of the bucket are plain means of all its elements.
        """
        self._tail = tail.real  # a view also for complex numbers
        on_device = next(device_tensors(tail), None) is not None
        self._pass.separate = not allowed or on_device or not tail.numel()

    def write_tail(self) -> None:
        """Write this rank's report into the tail.  Zeros report success."""
        self._tail.copy_(torch.tensor(self._pass.tail(), dtype=torch.float64, device="cpu"))

    def send_flags(self, present: Sequence[bool]) -> None:
        """Start the exchange of flags.  Collective.

        ``present`` tells for each parameter whether it has a gradient from earlier passes.
        """
        self._flags.copy_(torch.tensor(self._pass.flags(present), dtype=torch.uint8, device="cpu"))
        self._future = self._group.all_reduce(self._flags, op=MAX)

    def wait(self) -> None:
        """Pass the reports of all ranks to ``Pass``.  Called after waiting for the buckets."""
        if self._pass.separate:
            assert self._future is not None
            self._pass.decode_flags(self._future.wait().tolist())
            self._future = None
            return
        mean = self._tail.tolist()
        self._pass.decode_tail(mean, torch.finfo(self._tail.dtype).eps)
        if any(mean):
            self._tail.zero_()
