"""Places: sets of nodes that run the same operations.

A place of several nodes is a torch device. A tensor on it is one tensor of equal metadata on each node. An
operation on it is one command that each node executes on its own part. A place of one node is that node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast, overload

import torch

from ...common.copy_refusal import refuses_copies
from ...errors import UsageError
from ...spec import OpKind, why_illegal
from ..commands.interrupts import defer_interrupt
from ..commands.space import Space, apart
from ..commands.storage import Storage
from ..node import node_operators
from ..node.node_operators import REDUCTIONS
from ..protocol.commands import FETCH
from ..protocol.metadata import metadata
from ..tensor import current
from ..tensor.dispatch import dispatch
from ..tensor.tensor import RemoteTensor, TensorHandle, replies, wrap

#: nodes: an index, a device, or any number of these
NodesLike: TypeAlias = "int | str | torch.device | Iterable[NodesLike]"


@refuses_copies("a Place", "connections to its nodes", "Create another one from the same nodes")
class Place(Sequence[torch.device]):
    """A set of a master's nodes, made by :meth:`Master.place`; equal sets are the same object.

    A sequence of the devices of its nodes; a slice of it is a place.

    Attributes:
        device: the device of tensors on all of these nodes.
        indices: indices of the nodes, ascending.
        space: the space of its tensors.
    """

    def __init__(self, space: Space, place: Callable[[NodesLike], Place]) -> None:
        self._place = place
        self.space = space
        self.device = space.device
        self.indices = tuple(connection.index for connection in space.connections)

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
            values = self._split(values, dim)
        if len(values) != len(self):
            raise UsageError(f"scatter needs one tensor for each of the {len(self)} nodes, got {len(values)}")
        there = [value.detach().to(device) for value, device in zip(values, self, strict=True)]
        return self._combined(cast("list[RemoteTensor]", there))

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
        parts = replies(self._checked("gather", tensor), FETCH)
        return parts if dim is None else torch.cat(parts, dim)

    # -- collectives; they return at once, and autograd does not record them -------------------------

    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Replace each node's part of a tensor by the reduction of all parts.

        Args:
            tensor: a tensor on the place.
            op: ``"sum"``, ``"avg"``, ``"product"``, ``"min"`` or ``"max"``; `UsageError` if it does not
                support the dtype.
        """
        self._check("all_reduce_", OpKind.ALL_REDUCE, tensor, op)
        self._issue("all_reduce_", tensor, op)
        return tensor

    def average_(self, tensors: torch.Tensor | Iterable[torch.Tensor | None]) -> None:
        """Replace each node's parts of tensors by their averages, with one all-reduce per dtype.

        Args:
            tensors: tensors on the place, such as gradients, of dtypes that can be averaged; None is skipped.
        """
        given = (
            [tensors] if isinstance(tensors, torch.Tensor) else [each for each in tensors if each is not None]
        )
        for tensor in given:
            self._check("average_", OpKind.ALL_REDUCE, tensor, "avg")
        if given:
            self._issue("average_", given)

    def broadcast_(self, tensor: torch.Tensor, source: int | str | torch.device) -> torch.Tensor:
        """Replace each node's part of a tensor by that of `source`, a node of the place."""
        self._check("broadcast_", OpKind.BROADCAST, tensor)
        self._issue("broadcast_", tensor, self.indices.index(self.space.part(source).index))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> RemoteTensor:
        """Return a tensor of shape ``[nodes, *tensor.shape]`` with the parts of all nodes on each node."""
        self._check("all_gather", OpKind.ALL_GATHER, tensor)
        return cast(RemoteTensor, self._issue("all_gather", tensor))

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum") -> RemoteTensor:
        """Reduce the parts of all nodes and split the result among the nodes along its first dimension.

        Args:
            tensor: a tensor on the place; its first dimension must be divisible by the number of nodes.
            op: as for :meth:`all_reduce_`.
        """
        self._check("reduce_scatter", OpKind.REDUCE_SCATTER, tensor, op)
        if not tensor.dim() or tensor.shape[0] % len(self.indices):
            raise UsageError(
                f"reduce_scatter: a tensor of shape {list(tensor.shape)} cannot be divided evenly among "
                f"{len(self.indices)} nodes"
            )
        return cast(RemoteTensor, self._issue("reduce_scatter", tensor, op))

    def mean(self, tensor: torch.Tensor) -> RemoteTensor:
        """Return the mean of the parts of all nodes, as a tensor on the first node.

        ``place.mean(loss).item()`` is a number. Integers and bools are converted to torch's default dtype.
        """
        self._check("mean", OpKind.ALL_GATHER, tensor)
        x = tensor.detach()
        if not (x.is_floating_point() or x.is_complex()):
            x = x.to(torch.get_default_dtype())
        return cast(RemoteTensor, self._issue("mean", x)).on(self.indices[0])

    def _checked(self, name: str, tensor: torch.Tensor) -> RemoteTensor:
        if type(tensor) is not RemoteTensor or tensor.handle.space is not self.space:
            raise UsageError(f"{name} needs a tensor on {self.device}, and this one is on {tensor.device}")
        return tensor

    def _check(self, name: str, kind: OpKind, tensor: torch.Tensor, op: str = "sum") -> None:
        self._checked(name, tensor)
        if op not in REDUCTIONS:
            raise UsageError(f"{name}: op={op!r}: expected one of {', '.join(map(repr, REDUCTIONS))}")
        problem = why_illegal(kind, tensor.dtype, REDUCTIONS[op])
        if problem is not None:
            raise UsageError(f"{name}: {problem}")

    def _issue(self, name: str, *args: Any) -> Any:
        operator = getattr(torch.ops.shoal_node, name).default
        base = sum(connection.node.epoch for connection in self.space.connections)
        with self.space.lock, apart(self.space):
            return dispatch(operator, (*args, list(self.indices), base, current.master().name), {})

    def _split(self, value: torch.Tensor, dim: int) -> list[torch.Tensor]:
        length = value.shape[dim] if value.dim() else 0
        if not length or length % len(self):
            raise UsageError(
                f"a tensor of shape {list(value.shape)} cannot be divided evenly among {len(self)} nodes in "
                f"dimension {dim}"
            )
        parts = value.detach().chunk(len(self), dim)
        return [each.clone() if type(value) is RemoteTensor else each.contiguous() for each in parts]

    def _combined(self, parts: list[RemoteTensor]) -> RemoteTensor:
        """Make a tensor on the place that shares memory with one tensor on each node."""
        layouts = [each.handle.metadata.wire for each in parts]
        differs = next((i for i, each in enumerate(layouts) if each != layouts[0]), None)
        if differs is not None:
            raise UsageError(
                f"the parts of a tensor on {self.device} must be alike: the part on {parts[0].device} is "
                f"{parts[0].handle.metadata}, strides {layouts[0].stride}; the part "
                f"on {parts[differs].device} is {parts[differs].handle.metadata}, strides "
                f"{layouts[differs].stride}"
            )
        if len(parts) == 1:
            return parts[0]
        with self.space.lock:
            return _combine(self.space, [each.handle for each in parts])

    def __repr__(self) -> str:
        return f"<shoal.controller.Place of {self.space.nodes}: {self.device}>"


@defer_interrupt
def _combine(space: Space, handles: Sequence[TensorHandle]) -> RemoteTensor:
    """Make a tensor on a place from one tensor on each of its nodes; the caller holds the lock."""
    given = [(each.space, each.id, each.memory()) for each in handles]
    known = metadata(space.device, handles[0].metadata.wire)
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


# Metadata of the results of collectives: their arguments end with the members, the epochs and the session.
for _name, _fake in {
    "all_reduce_": lambda x, *rest: x,
    "average_": lambda tensors, *rest: None,
    "broadcast_": lambda x, *rest: x,
    "all_gather": lambda x, members, *rest: x.new_empty((len(members), *x.shape)),
    "reduce_scatter": lambda x, op, members, *rest: x.new_empty((x.shape[0] // len(members), *x.shape[1:])),
    "mean": lambda x, *rest: torch.empty_like(x),
}.items():
    torch.library.register_fake(f"{node_operators.NAMESPACE}::{_name}", _fake)
