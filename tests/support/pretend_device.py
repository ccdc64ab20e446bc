"""A device for torch, "pretend", on which models can be trained: the CPU's memory and fake streams.

A kernel is put on the current stream of the calling thread and runs when that stream comes to it; until then
what it writes holds NaN.  So whoever reads a result too early computes rubbish.  Reading a
result on the host (``item``, ``tolist``, a copy to the CPU) waits for the current stream, and is counted,
unless it is a copy with ``non_blocking=True``, which is a kernel like others.

Tensors of the device come from DLPack, where a capsule says on which device its memory is; kernels come
from a fallback for all operators of torch's PrivateUse1.  A process has the device once it is made, for
ever: tests make it in processes of their own.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from shoal.streams import register_runtime

from .fake_streams import FakeRuntime, FakeStream

DEVICE = torch.device("cpu")  # until it is made
_CPU, _PRETEND = 1, 12  # kDLCPU and kDLExtDev of DLPack

#: Operators whose result the host has to know.
_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2"}

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Head(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("index", ctypes.c_int32))


def _relabelled(x: torch.Tensor, device_type: int) -> torch.Tensor:
    """The same memory as a tensor of another type of device."""
    capsule = torch._C._to_dlpack(x)  # type: ignore[attr-defined]
    head = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_Head)).contents
    head.type, head.index = device_type, 0
    result: torch.Tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    return result


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the device as a tensor of the CPU: what is there now, ready or not."""
    return _relabelled(x, _CPU)


def is_pretend(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "pretend"


class PretendRuntime(FakeRuntime):
    """The streams of the device, and its kernels."""

    def __init__(self) -> None:
        super().__init__()
        #: what is registered in it lasts as long as it does
        self.library = torch.library.Library("_", "IMPL")

    def launch(self, stream: FakeStream, work: Any) -> None:
        """Run ``work()`` on the stream, without autograd; its results may be inference tensors."""

        def run() -> None:
            with torch.inference_mode():
                work()

        stream.enqueue(run)

    def read(self) -> None:
        """The host waits for the current stream."""
        self.synchronize(self.record(self.current_stream(DEVICE)))


def make() -> PretendRuntime:
    """Give this process the device: ``torch.device("pretend", 0)``."""
    global DEVICE
    _setup_privateuseone_for_python_backend("pretend")
    DEVICE = torch.device("pretend", 0)
    runtime = PretendRuntime()
    register_runtime("pretend", runtime)
    runtime.library.fallback(
        lambda operator, *args, **kwargs: _Call(runtime, operator, args, kwargs).run(), "PrivateUse1"
    )
    copy_storage = torch.Tensor.__deepcopy__

    def deepcopy(x: torch.Tensor, memo: Any) -> Any:
        """torch copies the storage, which needs an allocator of the device."""
        return memo.setdefault(id(x), x.detach().clone()) if is_pretend(x) else copy_storage(x, memo)

    torch.Tensor.__deepcopy__ = deepcopy  # type: ignore[assignment]
    return runtime


class _Call:
    """One call of an operator on tensors of the device."""

    def __init__(self, runtime: PretendRuntime, operator: Any, args: Any, kwargs: Any) -> None:
        self.runtime, self.operator = runtime, operator
        self.schema = operator._schema
        self.name = self.schema.name.removeprefix("aten::")
        # A number where the operator takes a tensor arrives as a number.
        arguments = self.schema.arguments
        args = tuple(_as_tensor(x, argument) for x, argument in zip(args, arguments, strict=False))
        self.args, self.kwargs = args, kwargs
        self.cpu_args, self.cpu_kwargs = tree_map(_to_cpu, (args, kwargs))
        names = [argument.name for argument in self.schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        self.on_cpu = dict(zip(names, self.cpu_args, strict=False)) | self.cpu_kwargs
        #: what the call writes to: alias -> (name, tensor)
        self.written = {
            _alias(argument.alias_info): (argument.name, given[argument.name])
            for argument in self.schema.arguments
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and given.get(argument.name) is not None
        }

    def run(self) -> Any:
        if self.name in ("_copy_from", "_copy_from_and_resize"):
            return self._copy(*self.args[:2], *self.args[2:3])
        if self.name == "resize_":
            return self._replace(self.args[0], torch.empty(self.cpu_args[1], dtype=self.args[0].dtype))
        if self.name in _READS:
            self.runtime.read()
            return tree_map(_to_device, self._on_cpu())
        if any(_is_view(returned) for returned in self.schema.returns):
            viewed = self._on_cpu()
            with torch.inference_mode(False):  # the view of a normal tensor must be one
                return tree_map(_to_device, viewed)
        if not any(is_pretend(leaf) for leaf in tree_leaves((self.args, self.kwargs))):
            made = tree_map(_to_device, tree_map(_spoilt, self._on_cpu()))  # makes a tensor
            if (graph := self.runtime.current_stream(DEVICE).graph) is not None:
                graph.keep.append(made)
            return made
        return self._enqueue()

    def _on_cpu(self, **others: Any) -> Any:
        kwargs = dict(self.cpu_kwargs)
        args = list(self.cpu_args)
        for place, argument in enumerate(self.schema.arguments):
            if argument.name in others:
                if place < len(args):
                    args[place] = others[argument.name]
                else:
                    kwargs[argument.name] = others[argument.name]
        return self.operator(*args, **kwargs)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if is_pretend(target):
            given = _to_cpu(source) if is_pretend(source) else source.detach().clone()
            memory = memory_of(target)
            self.runtime.launch(self.runtime.current_stream(DEVICE), lambda: memory.copy_(given))
        elif non_blocking:
            memory = memory_of(source)
            self.runtime.launch(self.runtime.current_stream(DEVICE), lambda: target.copy_(memory))
        else:
            self.runtime.read()
            target.copy_(memory_of(source))
        return target

    def _replace(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x.data = _to_device(_spoilt(memory))
        return x

    def _enqueue(self) -> Any:
        """Make room for the results, whose shapes a trial on the CPU tells, and enqueue the call."""
        outs = {
            name: torch.empty(0, dtype=x.dtype)
            for alias, (name, x) in self.written.items()
            if isinstance(x, torch.Tensor) and self._is_out(name)
        }
        trial: tuple[Any, ...] = ()
        returns = self.schema.returns
        if outs or any(returned.alias_info is None for returned in returns):
            copies = {name: tree_map(_copied, self.on_cpu[name]) for name, _ in self.written.values()}
            with torch.no_grad():
                result = self._on_cpu(**(copies | outs))
            trial = (result,) if len(returns) == 1 else result
        targets: list[tuple[str | int, torch.Tensor]] = []
        for name, out in outs.items():
            x = next(x for known, x in self.written.values() if known == name)
            if out.shape != x.shape:
                self._replace(x, torch.empty_like(out))
            targets.append((name, memory_of(x)))
        results: list[Any] = []
        for place, returned in enumerate(returns):
            if returned.alias_info is not None:
                results.append(self.written[_alias(returned.alias_info)][1])
            else:
                room = tree_map(_spoilt, trial[place])
                targets.append((place, room))
                results.append(tree_map(_to_device, room))

        def work() -> None:
            fresh = {name: torch.empty(0, dtype=out.dtype) for name, out in outs.items()}
            result = self._on_cpu(**fresh)
            made = (result,) if len(returns) == 1 else result
            for which, room in targets:
                values = fresh[which] if isinstance(which, str) else made[which]
                for to, value in zip(tree_leaves(room), tree_leaves(values), strict=True):
                    if isinstance(to, torch.Tensor):
                        to.copy_(value)

        self.runtime.launch(self.runtime.current_stream(DEVICE), work)
        return results[0] if len(returns) == 1 else tuple(results) if returns else None

    def _is_out(self, name: str) -> bool:
        return any(argument.name == name and argument.kwarg_only for argument in self.schema.arguments)


def _alias(info: Any) -> str:
    return str(next(iter(info.before_set or info.after_set)))


def _is_view(returned: Any) -> bool:
    return returned.alias_info is not None and not returned.alias_info.is_write


def _as_tensor(x: Any, argument: Any) -> Any:
    if isinstance(x, int | float) and str(argument.type) == "Tensor":
        return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64)
    return x


def _to_cpu(x: Any) -> Any:
    if is_pretend(x):
        return memory_of(x)
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "pretend" else x


def _to_device(x: Any) -> Any:
    return _relabelled(x, _PRETEND) if isinstance(x, torch.Tensor) else x


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _spoilt(x: Any) -> Any:
    """``x`` with what nobody may read: no value is ready before its kernel has run."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.fill_(float("nan")) if x.is_floating_point() or x.is_complex() else x.zero_()
