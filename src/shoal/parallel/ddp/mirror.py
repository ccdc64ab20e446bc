"""Copies of tensors that are kept equal to their originals."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Mirror:
    """Keeps ``followers``, lists of copies of ``sources`` with other devices or dtypes, up to date."""

    def __init__(self, sources: Sequence[torch.Tensor], followers: Sequence[Sequence[torch.Tensor]]) -> None:
        self._sources = list(sources)
        self._followers = [list(follower) for follower in followers]
        self._seen: list[object] = []
        self._step = -1

    def refresh(self, step: int) -> None:
        """Update the followers if the sources have changed, or if ``step`` has.

        Changes that autograd knows are written so that a backward pass which needs the old values fails.
        Others (collectives write directly to memory) come with a new ``step``, the number of reduced passes.
        A step may change nothing, so this write is hidden from autograd and backward stays possible.
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
