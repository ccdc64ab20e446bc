"""Nodes as a torch device: ``node:0``, ``node:1``, ..."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ...common.never_compile import never_compile
from ...errors import UnsupportedOperation
from ..commands.interrupts import defer_interrupt
from ..commands.space import Space
from ..protocol.metadata import NESTED, QUANTISED, SPARSE, unsupported_layout
from ..protocol.operators import find_overload, fused_on_nodes, special
from ..tensor import composite, current, transfer
from ..tensor.autograd import DeviceGuard, wrap_engine
from ..tensor.dispatch import dispatch
from ..tensor.node_devices import node as on_node
from ..tensor.node_devices import selected_device
from ..tensor.tensor import RemoteTensor
from .streams import Event, Stream, current_stream, default_stream

NAME = "node"

#: dispatch keys of tensors that nodes do not support, with their form
_NOT_DENSE = {
    "SparsePrivateUse1": SPARSE,
    "SparseCsrPrivateUse1": SPARSE,
    "QuantizedPrivateUse1": QUANTISED,
    "NestedTensorPrivateUse1": NESTED,
}

#: the operator that makes a compressed sparse tensor (CSR, CSC, BSR, BSC) from dense parts
_COMPRESSED_FACTORY = "_sparse_compressed_tensor_unsafe"

_context = threading.local()
_registering = threading.Lock()
_libraries: list[Any] = []


@never_compile
class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """Callbacks of torch's C++ code for the device."""

    @defer_interrupt
    def is_available(self) -> bool:
        return current.opened() is not None

    @defer_interrupt
    def has_primary_context(self, device_index: int) -> bool:
        return True

    @defer_interrupt
    def is_built(self) -> bool:
        return True


class _NoDtypes(list[torch.dtype]):
    """The dtypes of autocast: none.  ``torch.autocast`` looks for its dtype only if it is enabled."""

    def __contains__(self, dtype: object) -> bool:
        raise UnsupportedOperation(
            f"torch.autocast({NAME!r}): nodes have no autocast; convert the model, as in model.bfloat16(), "
            "or pass enabled=False"
        )


class NodeModule:
    """The module ``torch.node``, the counterpart of ``torch.cuda``."""

    @property
    def _initialized(self) -> bool:
        return self.is_initialized()

    def is_available(self) -> bool:
        """Return True if a master is open."""
        return current.opened() is not None

    is_initialized = is_available

    def device_count(self) -> int:
        """The number of nodes."""
        master = current.opened()
        return 0 if master is None else master.count

    def current_device(self) -> int:
        """The index of the default node, 0."""
        return 0

    def set_device(self, device: object) -> None:
        raise UnsupportedOperation(f"torch.node.set_device({device!r}): use `with torch.device({device!r}):`")

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Seed every node with the same number; ``torch.manual_seed`` calls this."""
        master = current.opened()
        if master is not None:
            master.seed(seed)

    manual_seed = manual_seed_all

    def synchronize(self, device: object = None) -> None:
        """Wait until a node has done everything issued to it; None: all nodes."""
        master = current.master()
        if device is None:
            master.synchronize()
        else:
            master.space(_index(device)).synchronize()

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """The state of a node's random generator; in ``with torch.node.device(-1)`` all states, one per row.

        Activation checkpointing uses -1, because ``get_device()`` of a tensor on a node is -1.
        """
        return torch.stack([each.random_state() for each in self._chosen(device)]).squeeze(0)  # type: ignore[misc]

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Restore a state that :meth:`get_rng_state` returned."""
        chosen = self._chosen(device)
        for each, row in zip(chosen, state.reshape(len(chosen), -1), strict=True):
            each.random_state(row.clone())

    def _chosen(self, device: object) -> Sequence[Space]:
        index = getattr(_context, "index", 0) if device is None else _index(device)
        master = current.master()
        if index < 0:
            return [master.space(each) for each in range(self.device_count())]
        return master.space(index).parts

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        """Select the node of ``get_rng_state`` and ``set_rng_state``; -1: all nodes."""
        before = getattr(_context, "index", 0)
        _context.index = _index(device)
        try:
            yield
        finally:
            _context.index = before

    Stream = Stream
    Event = Event
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)

    def stream(self, stream: Any) -> Any:
        """Return the context manager that selects a stream: the stream itself."""
        return stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return _NoDtypes()


@never_compile
def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(func, args, kwargs)


@never_compile
def _run(name: str, *args: Any, **kwargs: Any) -> Any:
    return dispatch(find_overload(name), args, kwargs)


@never_compile
def _run_composite(name: str, *args: Any, **kwargs: Any) -> Any:
    return composite.run(find_overload(f"aten::{name}"), args, kwargs)


@never_compile
def _refuse(form: tuple[str, str], *args: Any, **kwargs: Any) -> Any:
    raise unsupported_layout("this tensor", form)


@never_compile
def _unpinned_copy(x: torch.Tensor, device: object = None) -> torch.Tensor:
    """Return a copy in ordinary memory: a device backend written in Python has no pinned memory."""
    return x.clone()


_COMPRESSING = {
    "compressed": "comp_plain", "csr": "crow_col", "csc": "ccol_row", "bsr": "crow_col", "bsc": "ccol_row"
}  # fmt: skip
special(
    f"aten::{_COMPRESSED_FACTORY}",
    *(
        f"aten::sparse_{form}_tensor.{given}_value{size}"
        for form, given in _COMPRESSING.items()
        for size in ("", "_size")
    ),
)(partial(_refuse, SPARSE))
special("aten::_nested_view_from_jagged")(partial(_refuse, NESTED))


def _index(device: object) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0  # type: ignore[call-overload]


def register() -> None:
    """Register ``node`` as a torch device, once per process.

    Raises `UnsupportedOperation` if another package uses torch's only PrivateUse1 device.
    """
    with _registering:
        if _libraries:
            return
        named = torch._C._get_privateuse1_backend_name()
        if named != "privateuseone":
            raise UnsupportedOperation(
                f"this process already registered the device {named!r}, and torch supports one PrivateUse1 "
                "device per process: use a master in a process without it"
            )
        transfer.register_location()
        known: Any = proxy_tensor.HANDLED_TYPES
        proxy_tensor.HANDLED_TYPES = (*known, RemoteTensor)
        _setup_privateuseone_for_python_backend(NAME, NodeModule(), _Hooks(), DeviceGuard())
        fallback: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        fallback.fallback(_fallback, "PrivateUse1")
        for key, form in _NOT_DENSE.items():
            fallback.fallback(partial(_refuse, form), key)
        kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        kernels.impl("_copy_from", transfer.copy_from, "PrivateUse1")
        for name in composite.NAMES:
            kernels.impl(name, partial(_run_composite, name), "AutogradPrivateUse1")
        kernels.impl(_COMPRESSED_FACTORY, partial(_refuse, SPARSE), "PrivateUse1")
        kernels.impl("_pin_memory", _unpinned_copy, "CPU")
        kernels.impl("_local_scalar_dense", partial(_run, "aten::_local_scalar_dense"), "PrivateUse1")
        for name in fused_on_nodes():
            kernels.impl(name, partial(_run, name), "PrivateUse1")
        _libraries.extend((fallback, kernels))
        wrap_engine(lambda: current.opened() is not None)


def dist_send(tensor: torch.Tensor, node: int | None = None, device: int | None = None) -> torch.Tensor:
    """Return a copy of a tensor on a node, without waiting; a tensor already there is returned itself.

    Args:
        node: index of the node; None: that of ``with shoal.distributed.node(i)``, or node 0.
        device: the device within the node; None: that selected for this node, or the node's default.

    Raises:
        UsageError: there is no such node, or it has no such GPU.
    """
    index = selected_device.node if node is None else node
    within = (
        device if device is not None else selected_device.device if index == selected_device.node else None
    )
    with on_node(index, within):
        there = tensor.to(current.master().space(index).device)
    return there if device is None else there.within(device)  # type: ignore[attr-defined]


def install_dist_send() -> None:
    """Add the method to ``torch.Tensor``."""
    torch.Tensor.dist_send = dist_send  # type: ignore[attr-defined]


def uninstall_dist_send() -> None:
    """Remove the method."""
    if "dist_send" in vars(torch.Tensor):
        del torch.Tensor.dist_send  # type: ignore[attr-defined]
