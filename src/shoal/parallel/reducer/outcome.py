"""The outcome of a pass: its exchange (whether the pass succeeded on all ranks), and the error of a failure.

``cpp/ddp/outcome.h`` describes the two encodings.  The tail of the last bucket needs no message, but the
host must read it at the end of the pass.  For buckets on a device with streams the host would have to wait
for the device, so the outcome is then sent in a separate message from host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.formatting import shortened
from ...errors import OutOfStep, UnusedParameterError
from ...future import Future
from ...group import ProcessGroup
from ...spec import MAX
from ...streams import device_tensors
from ..core import HEAD_FLAGS, Pass

#: Maximum number of parameters named for one rank.
_MAX_NAMES_SHOWN = 20


class OutcomeExchange:
    """Exchanges the reports of ``passes``, for a number of ``parameters``, with the other ranks."""

    def __init__(self, group: ProcessGroup, passes: Pass, parameters: int) -> None:
        self._group = group
        self._pass = passes
        self._flags = group.empty(HEAD_FLAGS + parameters, dtype=torch.uint8)
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
        """Start the exchange of flags; ``present``: parameters with older gradients.  Collective."""
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


def raise_pass_error(
    group: ProcessGroup, names: Sequence[str], missing: Sequence[int], interrupted: bool, extra: int
) -> None:
    """Raise the error of a pass, except on ranks where an exception ended it.  Collective.

    Those ranks have already raised that exception.  A rank that catches it and skips the batch stays in step.

    Args:
        missing: indices of the parameters without a gradient on this rank.
        extra: forward passes of this rank since the last reduction, without the first.

    Raises:
        OutOfStep: some ranks ran more forward passes than others.
        UnusedParameterError: gradients are missing.
    """
    own = torch.zeros(len(names) + 2, dtype=torch.int32, device="cpu")
    own[list(missing)] = 1
    own[-2] = interrupted
    own[-1] = extra
    rows = [row.tolist() for row in group.all_gather(own).wait()]
    if interrupted:
        return
    seen = f"(seen by rank {group.rank}):\n  "
    undone = "The gradients of this step are undefined; the group is still usable."
    if len({row[-1] for row in rows}) > 1 and not any(row[-2] for row in rows):
        lines = [f"rank {rank}: {row[-1] + 1}" for rank, row in enumerate(rows)]
        raise OutOfStep(
            "the ranks ran different numbers of forward passes in training mode before this backward pass "
            + seen
            + "\n  ".join(lines)
            + "\nA rank with more of them skipped a backward pass.  Run a backward pass for every forward "
            f"pass on all ranks, or run the others under torch.no_grad() or in eval().  {undone}"
        )
    lines = []
    for rank, row in enumerate(rows):
        without = shortened([names[index] for index in range(len(names)) if row[index]], _MAX_NAMES_SHOWN)
        if row[-2]:
            lines.append(f"rank {rank}: an exception ended backward before {without}")
        elif without:
            lines.append(f"rank {rank}: {without}")
    raise UnusedParameterError(
        f"backward ended without gradients for some parameters {seen}"
        + "\n  ".join(lines)
        + "\nTheir buckets cannot become complete.  Use every parameter in the loss on every rank, wrap with "
        "find_unused_parameters=True, or freeze unused parameters (requires_grad_(False)) before wrapping "
        f"the model.  {undone}"
    )


def unexpected_gradient_message(where: str, *, static: bool, tolerant: bool) -> str:
    """Return the message for a gradient that arrived unexpectedly; ``where`` names it and the rank."""
    if static:
        return (
            f"{where} arrived more often than in the first backward pass, but static_graph=True requires "
            "all passes to be alike; omit that option"
        )
    advice = "use torch.utils.checkpoint with use_reentrant=False, or static_graph=True"
    if tolerant:
        return (
            f"{where} arrived twice, or although no output of the forward pass depends on it: it is used "
            f"outside of forward, or in a reentrant checkpoint, whose graph is not known; {advice}"
        )
    return (
        f"{where} arrived twice in one backward pass, because the parameter is used in several reentrant "
        f"checkpoints; {advice}"
    )
