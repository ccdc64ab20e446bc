"""Places: nodes on which operations run as one.

A place of several nodes is a device of torch.  A tensor on it is as many tensors of equal metadata, one on
each of its nodes, and an operation is one command that each node executes with its own.  A place of one node
is that node.
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

#: names of nodes: an index, a device, or any number of these
Named: TypeAlias = "int | str | torch.device | Iterable[Named]"


class Place(PlaceCollectives, Sequence[torch.device]):
    """Some of a master's nodes; :meth:`Master.place` makes it, one for equal sets.

    A sequence of the devices of its nodes; a slice of it is a place.

    Attributes:
        device: with tensors on all of the nodes.
        indices: of the nodes, ascending.
        space: of its tensors.
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
        """The same tensor on each node: ``value.to(place.device)``.

        Raises:
            UsageError: it is on several nodes.
        """
        return cast(RemoteTensor, value.to(self.device))

    def scatter(self, values: torch.Tensor | Sequence[torch.Tensor], dim: int = 0) -> RemoteTensor:
        """A part for each node, as one tensor on the place, without a graph.

        Args:
            values: one for each node, of equal shapes, dtypes and strides; or a tensor, which is divided.
                Those that are on their node already are used as they are, without a copy.
            dim: in which a tensor is divided.

        Raises:
            UsageError: there are not as many, they differ, or the tensor cannot be divided evenly.
        """
        if isinstance(values, torch.Tensor):
            values = self._divided(values, dim)
        if len(values) != len(self):
            raise UsageError(f"scatter needs a tensor for each node: {len(self)}, and not {len(values)}")
        there = [value.detach().to(device) for value, device in zip(values, self, strict=True)]
        return self._joined(cast("list[RemoteTensor]", there))

    def gather(self, tensor: torch.Tensor, dim: int | None = None) -> list[torch.Tensor] | torch.Tensor:
        """Copies here of what each node has of a tensor on the place; waits for all of them.

        Args:
            tensor: on this place.
            dim: in which they are concatenated; None: a list of them.

        Raises:
            UsageError: the tensor is elsewhere.
            RemoteOpError: one of them could not be computed.
            NodeLost: a node died.
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
        """One tensor on the place of one on each node, which share their memory."""
        told = [each.handle.metadata.told for each in there]
        differs = next((i for i, each in enumerate(told) if each != told[0]), None)
        if differs is not None:
            raise UsageError(
                f"the parts of a tensor on {self.device} must be alike: that on {there[0].device} is "
                f"{there[0].handle.metadata}, strides {told[0].stride}, and that on {there[differs].device} "
                f"{there[differs].handle.metadata}, strides {told[differs].stride}"
            )
        if len(there) == 1:
            return there[0]
        with self.space.lock:
            return _joined(self.space, [each.handle for each in there])

    def __repr__(self) -> str:
        return f"<shoal.controller.Place of {self.space.nodes}: {self.device}>"


@uncut
def _joined(space: Space, handles: Sequence[TensorHandle]) -> RemoteTensor:
    """One tensor on a place of one on each of its nodes; the caller holds the lock."""
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
    """The indices of the nodes that are named.

    Args:
        named: the names.
        space: gives that of a device's index.

    Raises:
        UsageError: there is no such node, or none is named.
    """
    found = sorted(set(_indices(named, space)))
    if not found:
        raise UsageError("a place needs a node at least")
    return tuple(found)


def _indices(named: Named, space: Callable[[int], Space]) -> Iterator[int]:
    if isinstance(named, int):
        yield from (line.index for line in space(named).lines)
    elif isinstance(named, (str, torch.device)):
        device = torch.device(named)
        if device.type != "node":
            raise UsageError(f"a place has nodes, and {named!r} is none")
        yield from _indices(device.index or 0, space)
    else:
        for each in named:
            yield from _indices(each, space)
