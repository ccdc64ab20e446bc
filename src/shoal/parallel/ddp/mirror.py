"""Tensors that follow others: what copies of a model were made from changes with every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Mirror:
    """Keeps lists of tensors equal to the tensors of a model, across devices and dtypes.

    Args:
        sources: what an optimiser changes.
        followers: lists like it.
    """

    def __init__(self, sources: Sequence[torch.Tensor], followers: Sequence[Sequence[torch.Tensor]]) -> None:
        self._sources = list(sources)
        self._followers = [list(follower) for follower in followers]
        self._seen: list[object] = []
        self._step = -1

    def refresh(self, step: int) -> None:
        """Bring the followers up to date, if the sources have changed or this is another step.

        Where torch knows of a change, it also learns that the followers were written to, and refuses a
        backward pass that still needs the old values.  Other changes (collectives write to memory that torch
        does not watch) come with steps; such a step may have changed nothing, so backward stays possible.

        Args:
            step: counts reduced passes.
        """
        seen: list[object] = [
            (tensor._version, tensor.data_ptr(), tensor.requires_grad) for tensor in self._sources
        ]
        if seen == self._seen and step == self._step:
            return
        with torch.no_grad():
            for follower in self._followers:
                into = follower if seen != self._seen else [tensor.data for tensor in follower]
                if into:
                    torch._foreach_copy_(into, self._sources)
                for tensor, source in zip(follower, self._sources, strict=True):
                    if tensor.requires_grad != source.requires_grad:
                        tensor.requires_grad_(source.requires_grad)
        self._seen, self._step = seen, step
