"""Tensors on nodes as the master's program sees them."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch._tensor_str import PRINT_OPTS

from ...common.copy_refusal import refuses_copies
from ...common.never_compile import never_compile
from ...errors import UnsupportedOperation, UsageError
from ...future import Future
from ..commands.batch import SegmentBatch
from ..commands.connection import StreamConnection
from ..commands.interrupts import defer_interrupt
from ..commands.storage import Storage
from ..protocol.commands import FETCH, ITEM
from ..protocol.metadata import Metadata, metadata
from .autograd import prepare_thread
from .node_devices import MoveWithinNode, checked_device_index, cuda_index

if TYPE_CHECKING:
    import numpy as np

    from ..commands.space import Space

#: signature: operator, positional arguments, keyword arguments
_Issue = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


@refuses_copies("the handle of a tensor", "memory of a node", "Copy the tensor")
class TensorHandle:
    """The master's reference to a tensor on a node; the tensor is freed when the handle is deleted.

    Attributes:
        space: the space that has the tensor.
        id: index in the space's list of tensors.
        metadata: the tensor's metadata.
        storage: the memory that it shares; None if no other tensor was made of its memory.
    """

    __slots__ = ("checked_results", "id", "metadata", "space", "storage")

    #: results whose success this tensor, the ``info`` of an operator, reports; set for such tensors only
    checked_results: Sequence[TensorHandle]

    @defer_interrupt
    def __init__(self, space: Space, id: int, metadata: Metadata) -> None:
        self.space = space
        self.id = id
        self.metadata = metadata
        self.storage: Storage | None = None

    def memory(self) -> Storage:
        """The storage, created at the first call."""
        storage = self.storage
        if storage is None:
            storage = self.storage = Storage()
        while storage.joined is not None:
            storage = self.storage = storage.joined
        return storage

    @defer_interrupt
    @never_compile
    def __del__(self) -> None:
        try:  # runs in any thread, in the garbage collector: do nothing else here
            id, self.id = self.id, -1  # the handle can still be found, and its id is reused soon
            if self.storage is None or self.space.ordering is None:
                self.space.freed.append(id)
            else:
                self.space.freed.append((id, self.storage))
        except AttributeError:  # Ctrl-C interrupted __init__
            pass


@never_compile
class RemoteTensor(torch.Tensor):
    """A tensor on a node.

    Operations return immediately. ``item``, ``tolist``, ``cpu``, ``numpy``, ``bool``, ``float`` and ``print``
    wait for its elements.

    Attributes:
        handle: the reference to the tensor on the node; shared with detached tensors.
    """

    handle: TensorHandle

    #: issues operations; set by :mod:`.dispatch`
    issue: ClassVar[_Issue]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return RemoteTensor.issue(func, args, {} if kwargs is None else kwargs)

    def get_node(self) -> int:
        """Return the index of the node.

        Raises:
            UsageError: the tensor is on several nodes.
        """
        space = self.handle.space
        if len(space.connections) > 1:
            raise UsageError(f"a tensor on {self.device} is on {space.nodes}: x.on(i) is one node's part")
        return space.index

    def on(self, node: int | str | torch.device) -> RemoteTensor:
        """Return one node's part of a tensor on several nodes: the same memory, without a graph.

        Raises:
            UsageError: the tensor is not on that node.
            NodeLost: that node is lost.
        """
        handle = self.handle
        space = handle.space.part(node)
        if space is handle.space:
            return new_tensor(handle)
        with space.lock:
            return _part(handle, space)

    def get_device(self) -> int:
        """Return the device within the node; -1 is its CPU."""
        return self.handle.metadata.within

    def within(self, device: int) -> torch.Tensor:
        """Return the tensor on another device of its node, with autograd; itself if it is there already.

        Args:
            device: -1 for the CPU of the node, else the index of a GPU.

        Raises:
            UsageError: the node has no such GPU.
        """
        if checked_device_index(self.handle.space, device) == self.get_device():
            return self
        return cast(torch.Tensor, MoveWithinNode.apply(self, device))  # type: ignore[no-untyped-call]

    def cuda(self, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tensor on a GPU of its node, the first by default.

        Raises:
            UsageError: the node has no such GPU.
        """
        index = 0 if device is None else cuda_index(device)
        return self.within(device if index is None else index)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like :meth:`torch.Tensor.to`; ``"cuda:1"`` is a GPU of the tensor's node."""
        given = kwargs.get("device", kwargs.get("other", args[0] if args else None))
        if type(given) is RemoteTensor:
            index = given.get_device() if given.device == self.device else None
        else:
            index = cuda_index(given)
        if index is None:
            return super().to(*args, **kwargs)
        moved = self.within(index)
        if type(given) is RemoteTensor:
            return moved.to(given.dtype)
        kwargs.pop("device", None)
        rest: torch.Tensor = torch.Tensor.to(moved, self.device, *args[1:], **kwargs)
        return rest

    def dist_receive(self) -> torch.Tensor:
        """Copy to the master, like ``cpu()``; waits for the copy."""
        return self.cpu()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Like :meth:`torch.Tensor.backward`."""
        prepare_thread()
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its graph; assignment rebinds this tensor to another one of a node."""
        return new_tensor(self.handle).requires_grad_(False)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if type(value) is not RemoteTensor:
            raise UsageError(f"the data of a tensor on {self.device} cannot be a tensor on {value.device}")
        rebind(self, value.handle)

    def as_subclass(self, cls: Any) -> Any:
        """Return the tensor itself if it is an instance of `cls`.

        Raises:
            UnsupportedOperation: `cls` is another class; a tensor can have one torch subclass only.
        """
        if isinstance(self, cls):
            return self
        raise UnsupportedOperation(
            f"a tensor on {self.device} is a RemoteTensor and cannot be a {cls.__name__} as well: use "
            "x.as_subclass(torch.Tensor) on the master before it moves, or a class that holds the tensor"
        )

    # -- methods that wait for elements ----------------------------------------------------------

    def item(self) -> Any:
        """Return the only element as a number."""
        if self.numel() != 1:
            return super().item()  # raises torch's error
        return item(self)

    def tolist(self) -> Any:
        """Return the elements as nested lists of numbers."""
        return fetch(self).tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return a copy of the elements as an array."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return fetch(self).numpy()

    def __dlpack_device__(self) -> Any:
        raise UsageError(f"the memory of a tensor on {self.device} is in another process: use x.cpu()")

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.__dlpack_device__()

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(_printable(self)).replace(", device='meta'", "")
        space = self.handle.space
        extra = [f"device={str(self.device)!r}"]
        if len(space.connections) > 1:
            extra.append(f"nodes={[connection.index for connection in space.connections]}")
        if self.get_device() >= 0:
            extra.append(f"within={self.get_device()}")
        if self.grad_fn is not None:
            extra.append(f"grad_fn=<{self.grad_fn.name()}>")
        elif self.requires_grad:
            extra.append("requires_grad=True")
        text = f"{text[:-1]}, {', '.join(extra)})"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as a CPU tensor, in the form that torch.load accepts with weights_only.
        here = fetch(self).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            here = torch.nn.Parameter(here, self.requires_grad)
        return here.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> torch.Tensor:
        copy = new_tensor(self.handle).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copy._is_param = True
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return cast(torch.Tensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        with torch.no_grad():
            copy = self.clone()
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        if getattr(self, "_is_param", False):
            copy._is_param = True  # without the gradient, as torch copies parameters
        elif self.grad is not None:
            copy.grad = copying.deepcopy(self.grad, memo)
        return copy


def _printable(tensor: RemoteTensor) -> torch.Tensor:
    """A CPU tensor with the elements that printing reads: all or the edges; none on several nodes."""
    if len(tensor.handle.space.connections) > 1:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if tensor.numel() <= PRINT_OPTS.threshold:
        return fetch(tensor)
    edge = PRINT_OPTS.edgeitems
    part = tensor.detach()
    # Untouched pages of the zeros take no memory.
    filled = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    places = []
    for dim, length in enumerate(tensor.shape):
        ends = list(range(length)) if length <= 2 * edge else [*range(edge), *range(length - edge, length)]
        index = torch.tensor(ends, device="cpu")
        part = part.index_select(dim, index.to(tensor.device))
        places.append(index)
    filled[torch.meshgrid(*places, indexing="ij")] = fetch(cast(RemoteTensor, part))
    return filled


def wrap(space: Space, id: int, known: Metadata) -> RemoteTensor:
    """Create a tensor for this id of a space."""
    return new_tensor(TensorHandle(space, id, known))


@defer_interrupt
def _part(handle: TensorHandle, space: Space) -> RemoteTensor:
    """One node's part of a place's tensor; the caller holds the lock."""
    known = metadata(space.device, handle.metadata.wire)
    if space.ordering is None:
        id = space.share(handle.id, handle.space)
    else:
        id = space.ordering.share(handle.id, handle.memory(), handle.space, space)
    made = wrap(space, id, known)
    made.handle.storage = handle.memory()
    return made


def new_tensor(handle: TensorHandle) -> RemoteTensor:
    """Create another tensor of the master with this handle."""
    known = handle.metadata
    make = known.make
    if make is None:  # positional arguments are the fastest for torch to parse
        layout = (known.shape, known.stride, known.offset, None, known.dtype, torch.strided, known.device)
        make = known.make = partial(torch.Tensor._make_wrapper_subclass, RemoteTensor, *layout)
    made: RemoteTensor = make()
    made.handle = handle
    if known.lazy:
        known.set_lazy_bits(made)
    return made


def rebind(tensor: RemoteTensor, handle: TensorHandle) -> None:
    """Make a tensor of the master refer to another handle, also with other metadata."""
    torch.Tensor.data.__set__(tensor, new_tensor(handle))  # type: ignore[attr-defined]
    tensor.handle = handle


def send_with_reply(tensor: RemoteTensor, command: int) -> list[tuple[StreamConnection, SegmentBatch]]:
    """Send a command that the tensor's nodes reply to; return the batches that contain it."""
    handle = tensor.handle
    space = handle.space
    with space.lock:
        if space.ordering is None:
            return space.send_request(command, handle.id)
        return space.ordering.ask(space, command, handle.id, handle.memory())


def replies(tensor: RemoteTensor, command: int) -> list[Any]:
    """Send a command on a tensor, wait for the nodes' replies and return them."""
    return [connection.values_of(batch)[0] for connection, batch in send_with_reply(tensor, command)]


def item(tensor: RemoteTensor) -> Any:
    """Wait for the only element of a tensor on one node, and return it as a number."""
    if len(tensor.handle.space.connections) > 1:
        raise tensor.handle.space.ambiguous()
    return replies(tensor, ITEM)[0]


def fetch(tensor: RemoteTensor) -> torch.Tensor:
    """Copy a tensor of one node to the master, and wait for it."""
    return request_copy(tensor)[1]()


def request_copy(tensor: RemoteTensor) -> tuple[Future[Any], Callable[[], torch.Tensor]]:
    """Request a copy of a tensor; return the reply's future, and a function that then returns the copy.

    Raises:
        UsageError: the tensor is on several nodes, each with its own elements.
    """
    known, space = tensor.handle.metadata, tensor.handle.space
    if len(space.connections) > 1:
        raise space.ambiguous()
    connection, batch = send_with_reply(tensor, FETCH)[0]
    return batch.future, lambda: _laid_out(connection.values_of(batch)[0], known)


def _laid_out(value: torch.Tensor, known: Metadata) -> torch.Tensor:
    if value.stride() == known.stride:
        return value
    # As in torch, a copy keeps a dense layout only.
    dense = torch.empty_like(torch.empty_strided(known.shape, known.stride, device="meta")).stride()
    if value.stride() == dense:
        return value
    return torch.empty_strided(known.shape, dense, dtype=known.dtype, device="cpu").copy_(value)
