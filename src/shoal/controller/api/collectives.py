"""The collectives of a place: each is one command, which the nodes execute as a shoal group.

They return at once, like every operation on a place, and autograd does not record them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from ...common.copy_refusal import refuses_copies
from ...errors import UsageError
from ...spec import OpKind, why_illegal
from ..commands.space import Space, apart
from ..node import between
from ..node.between import REDUCTIONS
from ..tensor import current
from ..tensor.dispatch import dispatch
from ..tensor.tensor import RemoteTensor


@refuses_copies(
    "a Place",
    "connections to its nodes",
    "Create another one from the same nodes",
)
class PlaceCollectives:
    """The collectives of a place; they raise `UsageError` for a tensor that is not on the place.

    Attributes:
        space: the space of the place's tensors.
        indices: indices of the nodes.
    """

    space: Space
    indices: tuple[int, ...]

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

    def _check(self, name: str, kind: OpKind, tensor: torch.Tensor, op: str = "sum") -> None:
        if type(tensor) is not RemoteTensor or tensor.handle.space is not self.space:
            raise UsageError(
                f"{name} needs a tensor on {self.space.device}, and this one is on {tensor.device}"
            )
        if op not in REDUCTIONS:
            raise UsageError(f"{name}: op={op!r}: expected one of {', '.join(map(repr, REDUCTIONS))}")
        problem = why_illegal(kind, tensor.dtype, REDUCTIONS[op])
        if problem is not None:
            raise UsageError(f"{name}: {problem}")

    def _issue(self, name: str, *args: Any) -> Any:
        operator = getattr(torch.ops.shoal_node, name).default
        base = sum(line.epoch for line in self.space.lines)
        with self.space.lock, apart(self.space):
            return dispatch(operator, (*args, list(self.indices), base, current.master().name), {})


# -- metadata of the results --------------------------------------------------------------------------


def _same(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return x


def _nothing(tensors: Sequence[torch.Tensor], *rest: object) -> None:
    pass


def _gathered(x: torch.Tensor, members: Sequence[int], base: int, session: str) -> torch.Tensor:
    return x.new_empty((len(members), *x.shape))


def _part(x: torch.Tensor, op: str, members: Sequence[int], base: int, session: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // len(members), *x.shape[1:]))


def _like(x: torch.Tensor, members: Sequence[int], base: int, session: str) -> torch.Tensor:
    return torch.empty_like(x)


for _name, _fake in (
    ("all_reduce_", _same), ("average_", _nothing), ("broadcast_", _same),
    ("all_gather", _gathered), ("reduce_scatter", _part), ("mean", _like),
):  # fmt: skip
    torch.library.register_fake(f"{between.NAMESPACE}::{_name}", _fake)
