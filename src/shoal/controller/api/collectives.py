"""The collectives of a place: each is one command, which its nodes execute as a shoal group.

They return at once, like every operation on a place, and are no part of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from ...common.copy_refusal import refuses_copies
from ...errors import UsageError
from ...spec import OpKind, illegality
from ..commands.space import Space, apart
from ..node import between
from ..node.between import REDUCTIONS
from ..tensor import current
from ..tensor.dispatch import dispatch
from ..tensor.tensor import RemoteTensor


@refuses_copies(
    "a Place",
    "connections to its nodes",
    "Make another one of the same nodes",
)
class PlaceCollectives:
    """The collectives of a place.

    Attributes:
        space: of the place's tensors.
        indices: of the nodes.
    """

    space: Space
    indices: tuple[int, ...]

    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Replace what each node has of a tensor by the reduction of all.

        Args:
            tensor: on the place.
            op: ``"sum" "avg" "product" "min" "max"``.

        Raises:
            UsageError: the tensor is elsewhere, or its dtype cannot be reduced so.
        """
        self._check("all_reduce_", OpKind.ALL_REDUCE, tensor, op)
        self._issue("all_reduce_", tensor, op)
        return tensor

    def average_(self, tensors: torch.Tensor | Iterable[torch.Tensor | None]) -> None:
        """Replace what each node has of tensors by the average, in one message for all of a dtype.

        Args:
            tensors: on the place, such as gradients; None among them are left out.

        Raises:
            UsageError: one is elsewhere, or its dtype has no averages.
        """
        given = (
            [tensors] if isinstance(tensors, torch.Tensor) else [each for each in tensors if each is not None]
        )
        for tensor in given:
            self._check("average_", OpKind.ALL_REDUCE, tensor, "avg")
        if given:
            self._issue("average_", given)

    def broadcast_(self, tensor: torch.Tensor, source: int | str | torch.device) -> torch.Tensor:
        """Replace what each node has of a tensor by what node ``source`` has.

        Raises:
            UsageError: the tensor is elsewhere, or the place has no such node.
        """
        self._check("broadcast_", OpKind.BROADCAST, tensor)
        self._issue("broadcast_", tensor, self.indices.index(self.space.part(source).index))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> RemoteTensor:
        """Collect the parts of all nodes, on each of them: ``[nodes, *tensor.shape]``.

        Raises:
            UsageError: the tensor is elsewhere.
        """
        self._check("all_gather", OpKind.ALL_GATHER, tensor)
        return cast(RemoteTensor, self._issue("all_gather", tensor))

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum") -> RemoteTensor:
        """The reduction of what all nodes have of a tensor, divided among them in its first dimension.

        Args:
            tensor: on the place.
            op: as of :meth:`all_reduce_`.

        Raises:
            UsageError: the tensor is elsewhere, cannot be reduced so, or cannot be divided evenly.
        """
        self._check("reduce_scatter", OpKind.REDUCE_SCATTER, tensor, op)
        if not tensor.dim() or tensor.shape[0] % len(self.indices):
            raise UsageError(
                f"reduce_scatter: a tensor of shape {list(tensor.shape)} cannot be divided evenly among "
                f"{len(self.indices)} nodes"
            )
        return cast(RemoteTensor, self._issue("reduce_scatter", tensor, op))

    def mean(self, tensor: torch.Tensor) -> RemoteTensor:
        """The mean over the nodes of what they have of a tensor, as a tensor on the first of them.

        So ``place.mean(loss).item()`` is a number.  Integers and bools become torch's default dtype.

        Raises:
            UsageError: the tensor is elsewhere.
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
        problem = illegality(kind, tensor.dtype, REDUCTIONS[op])
        if problem is not None:
            raise UsageError(f"{name}: {problem}")

    def _issue(self, name: str, *args: Any) -> Any:
        operator = getattr(torch.ops.shoal_node, name).default
        base = sum(line.epoch for line in self.space.lines)
        with self.space.lock, apart(self.space):
            return dispatch(operator, (*args, list(self.indices), base, current.master().name), {})


# -- what they give, by metadata alone ---------------------------------------------------------------


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
