"""Splitting a batch among the copies of a model, and concatenating their outputs.

As in ``torch.nn.parallel.scatter_gather``, tensors in tuples, lists and dicts are split and concatenated
along one dimension, scalars become a vector, and other objects are passed to all copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ...common.containers import Tree, map_leaves
from ...errors import UsageError


def is_packed(part: Any) -> bool:
    """Whether ``part`` is a PackedSequence, which is a tuple but must be kept whole."""
    return issubclass(type(part), PackedSequence)


def move_to(structure: Any, device: torch.device) -> Any:
    """Return ``structure`` with all its tensors on ``device``."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf.to(device=device)  # type: ignore[call-arg]
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(moved, structure, is_packed)


def split_batch(structure: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Split the tensors in tuples, lists and dicts into one part for each device, or fewer for small batches.

    Raises UsageError if a tensor cannot be split along ``dim``, or not into as many parts as the others.
    """
    tree = Tree(structure, is_packed)
    leaves = tree.leaves
    cut = [_chunks(leaf, len(devices), dim) for leaf in leaves]
    numbers = {len(chunks) for chunks in cut if chunks}
    if len(numbers) > 1:
        shapes = [list(leaf.shape) for leaf, chunks in zip(leaves, cut, strict=True) if chunks]
        raise UsageError(
            f"input tensors of shapes {shapes} cannot be split along dim={dim} into equally many parts for "
            f"{len(devices)} copies of the model; pass tensors that are not part of the batch in another way "
            "(as a buffer, for example)"
        )
    (number,) = numbers or {1}
    return [
        move_to(
            tree.build([chunks[i] if chunks else leaf for leaf, chunks in zip(leaves, cut, strict=True)]),
            devices[i],
        )
        for i in range(number)
    ]


def _chunks(leaf: Any, most: int, dim: int) -> list[torch.Tensor]:
    """Split one input; return an empty list if all copies get it unchanged."""
    if isinstance(leaf, PackedSequence):
        raise UsageError(
            "a PackedSequence cannot be split among copies of a model; let the model pack its sequences"
        )
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        return []
    if not -leaf.ndim <= dim < leaf.ndim:
        raise UsageError(f"an input tensor of shape {list(leaf.shape)} has no dim={dim} to split")
    length = leaf.shape[dim]
    size = max(1, -(-length // most))
    # not chunk(), because its results must not be written to
    return [leaf.narrow(dim, start, min(size, length - start)) for start in range(0, length or 1, size)]


def concatenate_outputs(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Concatenate the tensors in the outputs of the copies along ``dim``, on ``device``.

    Raises UsageError if outputs differ in more than tensors, or contain objects other than tensors.
    """
    trees = [Tree(output) for output in outputs]
    if any(tree.form != trees[0].form for tree in trees):
        raise UsageError(
            "the copies of the model returned structures that differ: "
            + ", ".join(f"copy {i}: {tree}" for i, tree in enumerate(trees))
        )
    together = zip(*(tree.leaves for tree in trees), strict=True)
    return trees[0].build([_concatenated(leaves, device, dim) for leaves in together])


def _concatenated(leaves: Sequence[Any], device: torch.device, dim: int) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        moved = [leaf.to(device) for leaf in leaves]
        return torch.stack(moved) if first.ndim == 0 else torch.cat(moved, dim)
    if first is None or isinstance(first, (bool, int, float, complex, str, bytes)):
        if all(leaf == first for leaf in leaves):
            return first
        raise UsageError(
            f"the copies of the model returned {', '.join(map(repr, leaves))}: only tensors can be joined"
        )
    raise UsageError(
        f"the model returned an object of type {type(first).__name__}; outputs of several copies must be "
        "tensors, or tuples, lists and dicts of tensors"
    )
