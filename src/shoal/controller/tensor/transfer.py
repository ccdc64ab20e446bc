"""Operators that move elements between the master and nodes, and operators that need no command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ...common.never_compile import never_compile
from ...errors import UnsupportedOperation, UsageError
from ...future import Future, collect_all
from ..protocol.operators import special
from . import current
from .copies import copied
from .dispatch import dispatch, upload
from .tensor import RemoteTensor, fetch, fetching, item, share
from .within import Within


@special("aten::detach", "aten::alias", "aten::lift_fresh", "aten::lift")
def _same(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return share(args[0].handle)


@special("aten::_local_scalar_dense")
def _item(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return item(args[0])


@special("aten::is_pinned")
def _is_pinned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return False


@special("aten::_pin_memory")
def _pin(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOperation(f"a tensor on {args[0].device} cannot be pinned: only CPU tensors can")


@special("aten::is_set_to")
def _is_set_to(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    one, other = (each.handle for each in args)
    return one.metadata is other.metadata and one.memory() is other.memory()


@special("aten::_to_copy")
def _to_copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, device = args[0], kwargs.get("device")
    if device is None or type(device) is Within or type(tensor) is not RemoteTensor:
        return NotImplemented
    space = tensor.handle.space
    if device.type == "node" and device.index in (None, space.index):
        return NotImplemented
    rest = {name: value for name, value in kwargs.items() if name != "device"}
    if device.type == "meta":
        known = tensor.handle.metadata
        return func(torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta"), **rest)
    if device.type == "node":
        sent = copied(_narrowed(tensor, rest.get("dtype")), current.master().space(device.index))
        return func(sent, **rest) if len(rest.keys() - {"non_blocking"}) else sent
    here = fetch(tensor)  # already a copy
    further = any(value not in (None, False) for name, value in rest.items() if name != "non_blocking")
    return func(here, **kwargs) if further or device.type != "cpu" else here


def _narrowed(tensor: RemoteTensor, dtype: torch.dtype | None) -> RemoteTensor:
    """Convert to a narrower dtype before the transfer; a wider one is converted after it."""
    if dtype is None or dtype.itemsize >= tensor.dtype.itemsize:
        return tensor
    return cast(RemoteTensor, tensor.to(dtype))


@special("aten::copy_")
def _copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    to, source = args[0], args[1]
    if type(to) is not RemoteTensor:
        return to.copy_(fetch(source))
    space = to.handle.space
    if type(source) is RemoteTensor:
        if source.handle.space is space:
            return NotImplemented
        return dispatch(func, (to, copied(_narrowed(source, to.dtype), space)), {})
    if source.device.type != "cpu":
        source = source.cpu()
    waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    sent = upload(space, source, to, waits)
    return to if sent is to else dispatch(func, (to, sent), {})


@never_compile
def copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The copy operator that torch's C++ calls if one side is a node.

    Raises:
        UsageError: the source is an uninitialized parameter of a lazy module.
    """
    if torch.nn.parameter.is_lazy(source):
        raise UsageError(
            f"an uninitialized parameter cannot move to {to.device}: call the lazy module with one input on "
            "the master first"
        )
    dispatch(torch.ops.aten.copy_.default, (to, source, non_blocking), {})
    return to


def fetch_all(tensors: Iterable[torch.Tensor]) -> Future[list[torch.Tensor]]:
    """Return a future of copies of many tensors as they are now; the master's tensors are not copied."""
    replies: list[Future[Any]] = []
    givers: list[Callable[[], torch.Tensor]] = []
    for tensor in tensors:
        if type(tensor) is RemoteTensor:
            reply, give = fetching(tensor)
            replies.append(reply)
            givers.append(give)
        else:
            givers.append(partial(_itself, tensor))
    return collect_all(replies).then(lambda _: [give() for give in givers])


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
