"""The error of a pass that went wrong, worded by all ranks together: each knows only its own part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import OutOfStep, UnusedParameterError
from ...group import ProcessGroup

#: Parameters named for one rank.
_SHOWN = 20


def explain(
    group: ProcessGroup, names: Sequence[str], missing: Sequence[int], interrupted: bool, extra: int
) -> None:
    """Raise the error of a pass on every rank but those whose pass an exception ended.  Collective.

    Those ranks have raised that exception.  A rank that catches it and skips the batch stays in step.

    Args:
        names: what to call the parameters.
        missing: those whose gradients did not come on this rank.
        interrupted: an exception ended this rank's pass.
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
            + "\nA rank with more of them left out a backward pass.  Let all ranks go backward through every "
            f"forward pass, or run those that need none under torch.no_grad() or in eval().  {undone}"
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
        + "\nTheir buckets can never be complete.  Use every parameter in the loss on every rank, wrap with "
        "find_unused_parameters=True, or freeze those that are not used (requires_grad_(False)) before "
        f"wrapping the model.  {undone}"
    )


def unexpected(where: str, *, static: bool, tolerant: bool) -> str:
    """The error of a gradient that arrived although it was not expected.

    Args:
        where: names the gradient and the rank.
        static, tolerant: whether the graph is static, or parameters may lack a gradient.
    """
    if static:
        return (
            f"{where} arrived more often than in the first backward pass, but static_graph=True promises "
            "that every pass is alike; leave that option out"
        )
    advice = "use torch.utils.checkpoint with use_reentrant=False, or static_graph=True"
    if tolerant:
        return (
            f"{where} arrived twice, or although no output of the forward pass depends on it: it is used "
            f"outside of forward, or in a reentrant checkpoint, which hides what it uses; {advice}"
        )
    return (
        f"{where} arrived twice in one backward pass, because the parameter is used in several reentrant "
        f"checkpoints; {advice}"
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
