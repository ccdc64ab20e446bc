"""Transfers of elements between the master and nodes, between nodes and from files; moves of modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...common.never_compile import never_compile
from ...errors import NodeLost, UnsupportedOperation, UsageError
from ...future import Future, collect_all
from ..commands.interrupts import call_without_interrupt
from ..commands.space import Space, apart
from ..node.node_operators import NAMESPACE
from ..protocol.copies import owned
from ..protocol.operators import special
from . import current
from .dispatch import dispatch, upload
from .node_devices import NodeDevice
from .tensor import RemoteTensor, fetch, item, new_tensor, rebind, request_copy

# -- operators that need no command, and copies to and from the master ---


@special("aten::detach", "aten::alias", "aten::lift_fresh", "aten::lift")
def _same(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return new_tensor(args[0].handle)


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
    if device is None or type(device) is NodeDevice or type(tensor) is not RemoteTensor:
        return NotImplemented
    space = tensor.handle.space
    if device.type == "node" and device.index in (None, space.index):
        return NotImplemented
    rest = {name: value for name, value in kwargs.items() if name != "device"}
    if device.type == "meta":
        known = tensor.handle.metadata
        return func(torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta"), **rest)
    if device.type == "node":
        sent = copy_between_nodes(_narrowed(tensor, rest.get("dtype")), current.master().space(device.index))
        return func(sent, **rest) if _changes(sent, rest) else sent
    here = fetch(tensor)
    return func(here, **kwargs) if device.type != "cpu" or _changes(here, rest) else owned(here)


def _changes(tensor: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether a copy with these options, besides that of the device, differs from the tensor."""
    same = (None, False, tensor.dtype, tensor.layout, torch.preserve_format)
    return any(value not in same for name, value in options.items() if name != "non_blocking")


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
        return dispatch(func, (to, copy_between_nodes(_narrowed(source, to.dtype), space)), {})
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
    copies: list[torch.Tensor | Callable[[], torch.Tensor]] = []
    for tensor in tensors:
        if type(tensor) is RemoteTensor:
            reply, copy = request_copy(tensor)
            replies.append(reply)
            copies.append(copy)
        else:
            copies.append(tensor)
    return collect_all(replies).then(
        lambda _: [each if isinstance(each, torch.Tensor) else each() for each in copies]
    )


# -- copies between nodes: a ``send`` command for one, a ``receive`` for the other ---
# The elements are sent directly between the nodes; the master does not wait.

_send = torch.ops.shoal_node.send.default
_receive = torch.ops.shoal_node.receive.default


def _received(
    routes: Sequence[int],
    session: str,
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


torch.library.register_fake(f"{NAMESPACE}::send", lambda x, routes, session: None)
torch.library.register_fake(f"{NAMESPACE}::receive", _received)


def copy_between_nodes(tensor: RemoteTensor, space: Space) -> RemoteTensor:
    """Copy a tensor to another space, directly between the nodes.

    From one node to a place, every node of the place receives the tensor. Between two places of equal size,
    each node sends its part to the node at the same position.

    Raises:
        UsageError: the places have different sizes, so it is ambiguous which node's part to copy.
        NodeLost: one of the nodes is lost.
    """
    source = tensor.handle.space
    routes = _routes(source, space)
    known = tensor.handle.metadata
    dense = torch.empty_like(torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta"))
    how = {"dtype": known.dtype, "device": space.device}
    session = current.master().name
    made: list[RemoteTensor] = []

    def both() -> None:  # never one without the other, or the counts of sends and receives would differ
        with space.lock:
            for each in (space, source):
                each.raise_if_lost()
            space.expect(dense.nbytes)
            awaited = routes, session, list(dense.shape), list(dense.stride())
            with apart(source, space):
                dispatch(_send, (tensor, routes, session), {})
                try:
                    made.append(dispatch(_receive, awaited, how))
                except NodeLost:  # lost just now: the other nodes of the place must receive what was sent
                    for part in space.parts:
                        with contextlib.suppress(NodeLost), apart(part):
                            dispatch(_receive, awaited, {**how, "device": part.device})
                    raise

    call_without_interrupt(both)
    return made[0]


def _routes(source: Space, space: Space) -> list[int]:
    """Flat (sender, receiver, channel) triples; the channel changes when either node is replaced."""
    senders, receivers = list(source.connections), list(space.connections)
    if len(senders) == 1:
        senders *= len(receivers)
    if len(senders) != len(receivers):
        raise source.ambiguous()
    return [
        number
        for sender, to in zip(senders, receivers, strict=True)
        for number in (sender.index, to.index, sender.node.epoch + to.node.epoch)
    ]


# -- files: ``torch.load(file, map_location="node:1")`` ---

#: before torch's default handler of such devices, which expects device memory in this process
_PRIORITY = 15


class _Read(torch.UntypedStorage):
    """A storage read from a file for `node`; `uploaded` has its bytes on the node once needed."""

    node: torch.device
    uploaded: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which torch creates the tensors of this storage."""
        return self.node

    def _set_from_file(self, *args: Any) -> None:
        """Read the bytes; for legacy files torch calls this after it has created the tensors."""
        super()._set_from_file(*args)  # type: ignore[no-untyped-call]
        if self.uploaded is not None:
            self.uploaded.copy_(self.bytes())

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(self)


def _restore(storage: Any, location: str) -> Any:
    """Convert a storage with a node as its location; torch creates tensors from it with ``set_``."""
    if location.partition(":")[0] != "node":
        return None
    device = torch.device(location)
    read = _Read(storage.nbytes())  # type: ignore[no-untyped-call]
    read.copy_(storage)
    read.node = torch.device("node", current.master().space(device.index or 0).index)
    return read


@special("aten::set_.source_Storage_storage_offset", "aten::set_.source_Storage")
def _set(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, storage, *layout = args
    if type(tensor) is not RemoteTensor:
        return NotImplemented
    if type(storage) is not _Read or not layout:
        raise UnsupportedOperation(
            f"a tensor on {tensor.device} cannot be made from a storage, whose memory is in another process: "
            "use views such as x.as_strided, x.cpu() for the elements, or torch.load(file, map_location=...) "
            "for files of torch.save"
        )
    if storage.uploaded is None:
        storage.uploaded = upload(tensor.handle.space, storage.bytes())
    offset, shape, *stride = layout
    known = storage.uploaded.view(tensor.dtype).as_strided(shape, stride[0] if stride else (), offset)
    rebind(tensor, known.handle)  # type: ignore[attr-defined]
    return tensor


def register_location() -> None:
    """Register nodes as a location with ``torch.load``."""
    torch.serialization.register_package(_PRIORITY, lambda storage: None, _restore)


# -- modules ---

#: maps a tensor of a module to its replacement
_Fn = Callable[[torch.Tensor], torch.Tensor]


def patch_module_moves() -> Callable[[], None]:
    """Make ``nn.Module._apply`` swap parameters that move to or from nodes; return what undoes it.

    Parameters of the master and of nodes have different classes, so torch would replace them in the module.
    Swapped in place (``torch.utils.swap_tensors``) they stay the same objects, for optimizers and tied
    weights.
    """
    apply = nn.Module._apply

    def apply_swapping(module: nn.Module, fn: _Fn, recurse: bool = True) -> nn.Module:
        swapping = fn if isinstance(fn, partial) and fn.func is _swap else partial(_swap, fn)
        return cast(nn.Module, apply(module, swapping, recurse))  # type: ignore[no-untyped-call]

    def undo() -> None:
        nn.Module._apply = apply  # type: ignore[method-assign]

    nn.Module._apply = apply_swapping  # type: ignore[method-assign]
    return undo


def _swap(fn: _Fn, tensor: torch.Tensor) -> torch.Tensor:
    """Apply a function given to ``_apply`` to a tensor; swap a parameter in place."""
    made = fn(tensor)
    if (type(made) is RemoteTensor) is (type(tensor) is RemoteTensor):
        return made
    if nn.parameter.is_lazy(tensor):
        raise UsageError(
            f"a parameter that is not initialized yet cannot move to {made.device}: give the lazy module "
            "one input here first"
        )
    if not isinstance(tensor, nn.Parameter):
        return made
    gradient, tensor.grad = tensor.grad, None
    try:
        becomes = nn.Parameter(made, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, becomes)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        tensor.grad = gradient
        raise UsageError(
            f"a parameter of shape {list(tensor.shape)} cannot move from {tensor.device} to "
            f"{made.device} while a weak reference, a graph, or a TorchScript module holds it: move a "
            f"module before its first forward pass and before compiling it with TorchScript ({error})"
        ) from error
    if gradient is not None:
        tensor.grad = fn(gradient)
    return tensor.data
