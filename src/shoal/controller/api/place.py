"""Places: sets of nodes that run the same operations.

A place of several nodes is a torch device. A tensor on it is one tensor of equal metadata on each node. An
operation on it is one command that each node executes on its own part. A place of one node is that node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, cast, overload

import torch

from ...errors import UsageError
from ..commands.interrupts import uncut
from ..commands.space import Space
from ..commands.storage import Storage
from ..protocol.commands import FETCH
from ..protocol.metadata import metadata
from ..tensor.tensor import RemoteTensor, TensorHandle, elements, wrap
from .collectives import PlaceCollectives

#: nodes: an index, a device, or any number of these
Named: TypeAlias = "int | str | torch.device | Iterable[Named]"


class Place(PlaceCollectives, Sequence[torch.device]):
    """A set of a master's nodes, made by :meth:`Master.place`; equal sets are the same object.

    A sequence of the devices of its nodes; a slice of it is a place.

    Attributes:
        device: the device of tensors on all of these nodes.
        indices: indices of the nodes, ascending.
        space: the space of its tensors.
    """

    def __init__(self, space: Space, place: Callable[[Named], Place]) -> None:
        self._place = place
        self.space = space
        self.device = space.device
        self.indices = tuple(line.index for line in space.lines)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[torch.device]:
        return (part.device for part in self.space.parts)

    @overload
    def __getitem__(self, at: int) -> torch.device: ...

    @overload
    def __getitem__(self, at: slice) -> Place: ...

    def __getitem__(self, at: int | slice) -> torch.device | Place:
        if isinstance(at, slice):
            return self._place(self.indices[at])
        return self.space.parts[at].device

    def replicate(self, value: torch.Tensor) -> RemoteTensor:
        """Copy a tensor to each node, as ``value.to(place.device)``; UsageError if it is on several nodes."""
        return cast(RemoteTensor, value.to(self.device))

    def scatter(self, values: torch.Tensor | Sequence[torch.Tensor], dim: int = 0) -> RemoteTensor:
        """Make a tensor on the place from one part per node; autograd does not record it.

        Args:
            values: one tensor for each node, of equal shapes, dtypes and strides, or one tensor to split.
                A tensor already on its node is used without a copy.
            dim: the dimension in which a tensor is split.

        Raises:
            UsageError: the number of tensors is wrong, they differ, or the tensor cannot be split evenly.
        """
        if isinstance(values, torch.Tensor):
            values = self._divided(values, dim)
        if len(values) != len(self):
            raise UsageError(f"scatter needs one tensor for each of the {len(self)} nodes, got {len(values)}")
        there = [value.detach().to(device) for value, device in zip(values, self, strict=True)]
        return self._joined(cast("list[RemoteTensor]", there))

    def gather(self, tensor: torch.Tensor, dim: int | None = None) -> list[torch.Tensor] | torch.Tensor:
        """Copy each node's part of a tensor to the master; waits for all of them.

        Args:
            tensor: a tensor on this place.
            dim: the dimension in which the parts are concatenated; None: return a list.

        Raises:
            UsageError: the tensor is not on this place.
            RemoteOpError: a part could not be computed.
            NodeLost: a node was lost.
        """
        if type(tensor) is not RemoteTensor or tensor.handle.space is not self.space:
            raise UsageError(f"gather needs a tensor on {self.device}, and this one is on {tensor.device}")
        parts = elements(tensor, FETCH)
        return parts if dim is None else torch.cat(parts, dim)

    def _divided(self, value: torch.Tensor, dim: int) -> list[torch.Tensor]:
        length = value.shape[dim] if value.dim() else 0
        if not length or length % len(self):
            raise UsageError(
                f"a tensor of shape {list(value.shape)} cannot be divided evenly among {len(self)} nodes in "
                f"dimension {dim}"
            )
        if type(value) is RemoteTensor:
            return [each.clone() for each in value.detach().chunk(len(self), dim)]
        return [each.contiguous() for each in value.detach().chunk(len(self), dim)]

    def _joined(self, there: list[RemoteTensor]) -> RemoteTensor:
        """Make a tensor on the place that shares memory with one tensor on each node."""
        told = [each.handle.metadata.told for each in there]
        differs = next((i for i, each in enumerate(told) if each != told[0]), None)
        if differs is not None:
            raise UsageError(
                f"the parts of a tensor on {self.device} must be alike: the part on {there[0].device} is "
                f"{there[0].handle.metadata}, strides {told[0].stride}; the part on "
                f"{there[differs].device} is {there[differs].handle.metadata}, strides {told[differs].stride}"
            )
        if len(there) == 1:
            return there[0]
        with self.space.lock:
            return _joined(self.space, [each.handle for each in there])

    def __repr__(self) -> str:
        return f"<shoal.controller.Place of {self.space.nodes}: {self.device}>"


@uncut
def _joined(space: Space, handles: Sequence[TensorHandle]) -> RemoteTensor:
    """Make a tensor on a place from one tensor on each of its nodes; the caller holds the lock."""
    given = [(each.space, each.id, each.memory()) for each in handles]
    known = metadata(space.device, handles[0].metadata.told)
    if space.ordering is None:
        made, joined = wrap(space, space.new_id(), known), Storage()
        for part, each, _ in given:
            part.give(each, space, made.handle.id)
    else:
        id, joined = space.ordering.join(space, given)
        made = wrap(space, id, known)
    for _, _, storage in given:
        storage.joined = joined
    made.handle.storage = joined
    return made


def indices_of(named: Named, space: Callable[[int], Space]) -> tuple[int, ...]:
    """Return the sorted indices of nodes or places; `space` returns the space of a device index.

    Raises `UsageError` if there is no such node or none is given.
    """
    found = sorted(set(_indices(named, space)))
    if not found:
        raise UsageError("a place needs at least one node")
    return tuple(found)


def _indices(named: Named, space: Callable[[int], Space]) -> Iterator[int]:
    if isinstance(named, int):
        yield from (line.index for line in space(named).lines)
    elif isinstance(named, (str, torch.device)):
        device = torch.device(named)
        if device.type != "node":
            raise UsageError(f"a place consists of nodes, and {named!r} is not a node")
        yield from _indices(device.index or 0, space)
    else:
        for each in named:
            yield from _indices(each, space)
