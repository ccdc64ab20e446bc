"""The error of a failed pass, composed from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import OutOfStep, UnusedParameterError
from ...group import ProcessGroup

#: Maximum number of parameters named for one rank.
_MAX_NAMES_SHOWN = 20


def explain(
    group: ProcessGroup, names: Sequence[str], missing: Sequence[int], interrupted: bool, extra: int
) -> None:
    """Raise the error of a pass, except on ranks where an exception ended it.  Collective.

    Those ranks have already raised that exception.  A rank that catches it and skips the batch stays in step.

    Args:
        names: names of the parameters for the message.
        missing: indices of the parameters without a gradient on this rank.
        interrupted: whether an exception ended this rank's pass.
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
        without = [names[index] for index in range(len(names)) if row[index]]
        if row[-2]:
            lines.append(f"rank {rank}: an exception ended backward before {_listed(without)}")
        elif without:
            lines.append(f"rank {rank}: {_listed(without)}")
    raise UnusedParameterError(
        f"backward ended without gradients for some parameters {seen}"
        + "\n  ".join(lines)
        + "\nTheir buckets cannot become complete.  Use every parameter in the loss on every rank, wrap with "
        "find_unused_parameters=True, or freeze unused parameters (requires_grad_(False)) before wrapping "
        f"the model.  {undone}"
    )


def unexpected(where: str, *, static: bool, tolerant: bool) -> str:
    """Return the message for a gradient that arrived unexpectedly.

    Args:
        where: the gradient and the rank, for the message.
        static, tolerant: whether the graph is static; whether parameters may have no gradient.
    """
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


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return shown + (f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else "")
