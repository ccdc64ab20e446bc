"""The operators that nodes have in addition to torch's.

``shoal_node::...`` are copies and collectives between nodes. As operators they are interned, recorded and
traced to a program line like all others. ``members`` are the participating nodes in the order of their ranks;
``session`` is the name of the master's session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...common.never_compile import never_compile
from ...group import ProcessGroup
from ...spec import AVG, MAX, MIN, PRODUCT, SUM, ReduceOp
from ..protocol.commands import Definition, Template
from ..protocol.copies import owned
from . import peers

#: namespace of copies and collectives, and of checks
NAMESPACE, CHECKS = "shoal_node", "shoal_check"
#: reductions by their public names
REDUCTIONS: dict[str, ReduceOp] = {"sum": SUM, "avg": AVG, "product": PRODUCT, "min": MIN, "max": MAX}

_libraries = {name: torch.library.Library(name, "DEF") for name in (NAMESPACE, CHECKS)}  # type: ignore[no-untyped-call]
Fn = Callable[..., Any]


def _operator(schema: str, namespace: str = NAMESPACE) -> Callable[[Fn], Fn]:
    def mark(fn: Fn) -> Fn:
        library: Any = _libraries[namespace]
        library.define(schema)
        library.impl(schema.partition("(")[0], never_compile(fn), "CompositeExplicitAutograd")
        return fn

    return mark


# -- copies: `routes` are triples of sender, receiver and channel --------------------------------------------


@_operator("send(Tensor x, int[] routes, str session) -> ()")
def _send(x: torch.Tensor, routes: Sequence[int], session: str) -> None:
    mine = peers.of_session(session)
    for to, channel in _receivers(routes, mine.index):
        mine.send(x, to, channel)


@_operator(
    "receive(int[] routes, str session, int[] shape, int[] stride, *, ScalarType dtype, Device device) "
    "-> Tensor"
)
def _receive(
    routes: Sequence[int],
    session: str,
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    mine = peers.of_session(session)
    source, channel = next((sender, at) for sender, to, at in _routes(routes) if to == mine.index)
    x = mine.receive(source, channel)
    return owned(x) if device.type == "cpu" else x.to(device)


def _routes(routes: Sequence[int]) -> list[tuple[int, int, int]]:
    return list(zip(routes[::3], routes[1::3], routes[2::3], strict=True))


def _receivers(routes: Sequence[int], index: int) -> list[tuple[int, int]]:
    return [(to, channel) for sender, to, channel in _routes(routes) if sender == index]


# -- collectives -------------------------------------------------------------------------------------


def _collective(schema: str, returns: str) -> Callable[[Fn], Fn]:
    """Decorate ``fn(group, *args)``, the part of a node in a collective, to define its operator."""

    def mark(fn: Fn) -> Fn:
        def collective(*args: Any) -> Any:
            *given, members, epoch_sum, session = args
            return peers.of_session(session).groups.run(members, epoch_sum, lambda group: fn(group, *given))

        _operator(f"{schema}, int[] members, int epoch_sum, str session) -> {returns}")(collective)
        return fn

    return mark


@_collective("all_reduce_(Tensor(a!) x, str op", "Tensor(a!)")
def _all_reduce(group: ProcessGroup, x: torch.Tensor, op: str) -> torch.Tensor:
    group.all_reduce(x, op=REDUCTIONS[op]).wait()
    return x


@_collective("average_(Tensor(a!)[] tensors", "()")
def _average(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Use one all-reduce per dtype, in memory of the group that is reduced without copies."""
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [each for each in tensors if each.dtype == dtype]
        flat = group.empty(sum(each.numel() for each in alike), dtype=dtype)
        parts = [
            part.view(each.shape)
            for part, each in zip(torch.split(flat, [each.numel() for each in alike]), alike, strict=True)
        ]
        torch._foreach_copy_(parts, alike)
        group.all_reduce(flat, op=AVG).wait()
        torch._foreach_copy_(alike, parts)


@_collective("broadcast_(Tensor(a!) x, int source", "Tensor(a!)")
def _broadcast(group: ProcessGroup, x: torch.Tensor, source: int) -> torch.Tensor:
    group.broadcast(x, source).wait()
    return x


@_collective("all_gather(Tensor x", "Tensor")
def _all_gather(group: ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((group.size, *x.shape))
    group.all_gather_single(out, x.contiguous()).wait()
    return out


@_collective("reduce_scatter(Tensor x, str op", "Tensor")
def _reduce_scatter(group: ProcessGroup, x: torch.Tensor, op: str) -> torch.Tensor:
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    group.reduce_scatter_single(out, x.contiguous(), op=REDUCTIONS[op]).wait()
    return out


@_collective("mean(Tensor x", "Tensor")
def _mean(group: ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    group.all_reduce(out, op=AVG).wait()
    return out


# -- checks ------------------------------------------------------------------------------------------


@_operator("linalg(Tensor info, str name, bool is_matrix, Tensor(a!)[] made) -> ()", CHECKS)
def _linalg(info: torch.Tensor, name: str, is_matrix: bool, made: Sequence[torch.Tensor]) -> None:
    """Check a result of linear algebra; a failure poisons the results `made`.

    Torch's own check has neither results nor the checked tensors as operands, so its failure would leave e.g.
    the factor of a matrix that cannot be factorized unpoisoned.
    """
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)


# -- poisoned operands -----------------------------------------------------------------------------


def propagate_poison(definition: Definition, number: int, of: tuple[int, int] | None) -> None:
    """Send the poison of an operand to the other nodes of a copy or collective, which would otherwise wait.

    `number` is the failure on this node, `of` the node and number of its cause (None: it happened here).
    Raises as the call itself does.
    """
    named = definition.operator.removeprefix(f"{NAMESPACE}::")
    given = [_constant(each) for each in definition.args]
    mine = peers.of_session(given[-1])
    poison = (mine.index, number) if of is None else of
    if named == "send":
        for to, channel in _receivers(given[1], mine.index):
            mine.send_poison(poison, to, channel)
    else:
        mine.groups.run(given[-3], given[-2], lambda group: None, poison)


def _constant(template: Template) -> Any:
    if template[0] == "list":
        return [_constant(each) for each in template[1]]
    return template[1] if template[0] == "constant" else None
