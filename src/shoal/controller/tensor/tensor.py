"""A tensor on a node, as the master's program sees it."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch._tensor_str import PRINT_OPTS

from ...common.copy_refusal import refuses_copies
from ...common.uncompiled import uncompiled
from ...errors import UnsupportedOperation, UsageError
from ...future import Future
from ..commands.batch import SegmentBatch
from ..commands.interrupts import uncut
from ..commands.line import NodeConnection
from ..commands.storage import Storage
from ..protocol.commands import FETCH, ITEM
from ..protocol.metadata import Metadata, metadata
from .autograd import prepare_thread
from .within import Moved, checked, of_accelerator

if TYPE_CHECKING:
    import numpy as np

    from ..commands.space import Space

#: an operator, its arguments, and those with keywords
_Issue = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


@refuses_copies(
    "the handle of a tensor",
    "memory of a node",
    "Copy the tensor",
)
class TensorHandle:
    """The master's hold on a tensor of a node, which frees it when nothing has the handle any more.

    Attributes:
        space: that has the tensor.
        id: index in the space's list of tensors.
        metadata: of the tensor.
        storage: which memory it shows; None: its own, of which no other tensor was made.
    """

    __slots__ = ("id", "metadata", "proved", "space", "storage")

    #: what an operator made beside a tensor that says whether it succeeded; only such tensors have it
    proved: Sequence[TensorHandle]

    @uncut
    def __init__(self, space: Space, id: int, metadata: Metadata) -> None:
        self.space = space
        self.id = id
        self.metadata = metadata
        self.storage: Storage | None = None

    def memory(self) -> Storage:
        """The storage, which further tensors may show."""
        storage = self.storage
        if storage is None:
            storage = self.storage = Storage()
        while storage.joined is not None:
            storage = self.storage = storage.joined
        return storage

    @uncut
    @uncompiled
    def __del__(self) -> None:
        try:  # in whatever thread the garbage collector runs: nothing else
            id, self.id = self.id, -1  # it can still be found, and another tensor may have its id in a moment
            if self.storage is None or self.space.ordering is None:
                self.space.freed.append(id)
            else:
                self.space.freed.append((id, self.storage))
        except AttributeError:  # a Ctrl-C ended its making
            pass


@uncompiled
class RemoteTensor(torch.Tensor):
    """A tensor that lives on a node.

    Operations on it return at once.  ``item tolist cpu numpy bool float print`` need its elements here, and
    wait for them.

    Attributes:
        handle: of the tensor on the node; a detached tensor has the same one.
    """

    handle: TensorHandle

    #: where operations go; :mod:`.dispatch` says it
    issue: ClassVar[_Issue]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return RemoteTensor.issue(func, args, {} if kwargs is None else kwargs)

    def get_node(self) -> int:
        """The index of the node.

        Raises:
            UsageError: there are several.
        """
        space = self.handle.space
        if len(space.lines) > 1:
            raise UsageError(f"a tensor on {self.device} is on {space.nodes}: on(i) is one node's part")
        return space.index

    def on(self, node: int | str | torch.device) -> RemoteTensor:
        """One node's part of a tensor on several: a tensor there, of the same memory, without a graph.

        Raises:
            UsageError: the tensor is not on that node.
            NodeLost: that node died.
        """
        handle = self.handle
        space = handle.space.part(node)
        if space is handle.space:
            return share(handle)
        with space.lock:
            return _part(handle, space)

    def get_device(self) -> int:
        """The device within the node; -1: its processor."""
        return self.handle.metadata.within

    def within(self, device: int) -> torch.Tensor:
        """The tensor on another device of its node, which autograd follows; itself, if it is there.

        Args:
            device: -1 is the processor of the node, and its GPUs count from 0.

        Raises:
            UsageError: the node has no such GPU.
        """
        if checked(self.handle.space, device) == self.get_device():
            return self
        return cast(torch.Tensor, Moved.apply(self, device))  # type: ignore[no-untyped-call]

    def cuda(self, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The tensor on a GPU of its node: the first, or the one that is named.

        Raises:
            UsageError: the node has no such GPU.
        """
        index = 0 if device is None else of_accelerator(device)
        return self.within(device if index is None else index)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of every tensor; ``"cuda:1"`` is a GPU of its node."""
        given = kwargs.get("device", kwargs.get("other", args[0] if args else None))
        if type(given) is RemoteTensor:
            index = given.get_device() if given.device == self.device else None
        else:
            index = of_accelerator(given)
        if index is None:
            return super().to(*args, **kwargs)
        moved = self.within(index)
        if type(given) is RemoteTensor:
            return moved.to(given.dtype)
        kwargs.pop("device", None)
        rest: torch.Tensor = torch.Tensor.to(moved, self.device, *args[1:], **kwargs)
        return rest

    def dist_receive(self) -> torch.Tensor:
        """A copy here, as ``cpu()``: waits for it."""
        return self.cpu()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As of every tensor."""
        prepare_thread()
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> torch.Tensor:
        """The same tensor without its graph; assigned another one, this one stands for that from then on."""
        return share(self.handle).requires_grad_(False)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if type(value) is not RemoteTensor:
            raise UsageError(f"the data of a tensor on {self.device} cannot be a tensor on {value.device}")
        rebind(self, value.handle)

    def as_subclass(self, cls: Any) -> Any:
        """Itself, if it is of this class.

        Raises:
            UnsupportedOperation: it is another one: torch has room for one class of a tensor.
        """
        if isinstance(self, cls):
            return self
        raise UnsupportedOperation(
            f"a tensor on {self.device} is a RemoteTensor and cannot be a {cls.__name__} as well: use "
            "x.as_subclass(torch.Tensor) on the master before it moves, or a class that holds the tensor"
        )

    # -- elements: each of these waits -----------------------------------------------------------

    def item(self) -> Any:
        """The one element, as a number."""
        if self.numel() != 1:
            return super().item()  # torch says what is wrong
        return item(self)

    def tolist(self) -> Any:
        """The elements, as lists of numbers."""
        return fetch(self).tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The elements, as an array, which is a copy."""
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
        text = repr(_shown(self)).replace(", device='meta'", "")
        space = self.handle.space
        extra = [f"device={str(self.device)!r}"]
        if len(space.lines) > 1:
            extra.append(f"nodes={[line.index for line in space.lines]}")
        if self.get_device() >= 0:
            extra.append(f"within={self.get_device()}")
        if self.grad_fn is not None:
            extra.append(f"grad_fn=<{self.grad_fn.name()}>")
        elif self.requires_grad:
            extra.append("requires_grad=True")
        text = f"{text[:-1]}, {', '.join(extra)})"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __reduce_ex__(self, protocol: Any) -> Any:
        # It is one of the CPU wherever it is read, in the form that torch.load takes with weights_only.
        here = fetch(self).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            here = torch.nn.Parameter(here, self.requires_grad)
        return here.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> torch.Tensor:
        copy = share(self.handle).requires_grad_(self.requires_grad)
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
            copy._is_param = True  # and no gradient, as torch copies parameters
        elif self.grad is not None:
            copy.grad = copying.deepcopy(self.grad, memo)
        return copy


def _shown(tensor: RemoteTensor) -> torch.Tensor:
    """A tensor of the CPU of the same shape, with the elements that printing reads: all, or the edges.

    On several nodes printing reads none.
    """
    if len(tensor.handle.space.lines) > 1:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if tensor.numel() <= PRINT_OPTS.threshold:
        return fetch(tensor)
    edge = PRINT_OPTS.edgeitems
    part = tensor.detach()
    # Memory that is not touched is not there.
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
    """A tensor with this id on a node."""
    return share(TensorHandle(space, id, known))


@uncut
def _part(handle: TensorHandle, space: Space) -> RemoteTensor:
    """One node's part of a tensor of a place; the caller holds the lock."""
    known = metadata(space.device, handle.metadata.told)
    if space.ordering is None:
        id = space.share(handle.id, handle.space)
    else:
        id = space.ordering.share(handle.id, handle.memory(), handle.space, space)
    made = wrap(space, id, known)
    made.handle.storage = handle.memory()
    return made


def share(handle: TensorHandle) -> RemoteTensor:
    """One more tensor of the master for a tensor on a node."""
    known = handle.metadata
    make = known.make
    if make is None:  # arguments in their order are what torch takes apart the fastest
        layout = (known.shape, known.stride, known.offset, None, known.dtype, torch.strided, known.device)
        make = known.make = partial(torch.Tensor._make_wrapper_subclass, RemoteTensor, *layout)
    made: RemoteTensor = make()
    made.handle = handle
    if known.lazy:
        torch._C._set_conj(made, known.conj)
        torch._C._set_neg(made, known.neg)
    return made


def rebind(tensor: RemoteTensor, handle: TensorHandle) -> None:
    """Let a tensor of the master stand for another tensor on a node, also of other metadata."""
    torch.Tensor.data.__set__(tensor, share(handle))  # type: ignore[attr-defined]
    tensor.handle = handle


def asked(tensor: RemoteTensor, command: int) -> list[tuple[NodeConnection, SegmentBatch]]:
    """Send a command on a tensor that its nodes reply to; the batches in which it is."""
    handle = tensor.handle
    space = handle.space
    with space.lock:
        if space.ordering is None:
            return space.send_asked(command, handle.id)
        return space.ordering.ask(space, command, handle.id, handle.memory())


def elements(tensor: RemoteTensor, command: int) -> list[Any]:
    """The replies of the nodes to a command on a tensor; waits for them."""
    return [line.answers(batch)[0] for line, batch in asked(tensor, command)]


def item(tensor: RemoteTensor) -> Any:
    """The one element of a tensor, as a number; waits for it.

    Raises:
        UsageError: there are several nodes, each with elements of its own.
    """
    if len(tensor.handle.space.lines) > 1:
        raise tensor.handle.space.ambiguous()
    return elements(tensor, ITEM)[0]


def fetch(tensor: RemoteTensor) -> torch.Tensor:
    """A copy of a tensor here; waits for it.

    Raises:
        UsageError: there are several nodes, each with elements of its own.
    """
    return fetching(tensor)[1]()


def fetching(tensor: RemoteTensor) -> tuple[Future[Any], Callable[[], torch.Tensor]]:
    """Ask for a copy of a tensor here: a future that is done with the reply, and what gives the copy then.

    Raises:
        UsageError: there are several nodes, each with elements of its own.
    """
    known, space = tensor.handle.metadata, tensor.handle.space
    if len(space.lines) > 1:
        raise space.ambiguous()
    line, batch = asked(tensor, FETCH)[0]
    return batch.future, lambda: _laid_out(line.answers(batch)[0], known)


def _laid_out(value: torch.Tensor, known: Metadata) -> torch.Tensor:
    if value.stride() == known.stride:
        return value
    # A dense layout is kept, and another one is not that of a copy.
    dense = torch.empty_like(torch.empty_strided(known.shape, known.stride, device="meta"))
    return torch.empty_strided(known.shape, dense.stride(), dtype=known.dtype, device="cpu").copy_(value)
