"""Several copies of a model in one process, each on its own device, with one batch split among them.

Every forward pass splits its tensors along one dimension, runs each part through one copy in a separate
thread, and concatenates the outputs.  The reducer sums the gradients of the copies, so the process acts like
one rank with the whole batch.  The first copy is the model itself: its parameters are trained and its buffers
are kept; the other copies are refreshed from it.

As in ``torch.nn.parallel.scatter_gather``, tensors in tuples, lists and dicts are split and concatenated
along one dimension, scalars become a vector, and other objects are passed to all copies.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ...common.containers import Tree, map_leaves
from ...common.formatting import text_of
from ...errors import UsageError
from .module_tensors import Mirror, refuse_scripted

Device = torch.device | str | int


def pick_device(device: Device) -> torch.device:
    """Return the ``torch.device`` for ``device``; a number is the index of an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device, int):
        if accelerator is None:
            raise UsageError(
                f"device {device} is the index of an accelerator, but torch finds no accelerator; use 'cpu' "
                "for the processor"
            )
        return torch.device(accelerator.type, device)
    device = torch.device(device)
    if accelerator is not None and device.type == accelerator.type and device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def pick_devices(
    tensors: Iterable[torch.Tensor], device_ids: Sequence[Device] | None, output_device: Device | None
) -> tuple[tuple[torch.device, ...], torch.device | None]:
    """Return the devices of the copies, and the device for outputs.

    Raises UsageError if ``tensors``, those of the module, are not on the first device.
    """
    devices = tuple(pick_device(device) for device in device_ids or ())
    output = pick_device(output_device) if output_device is not None else None
    if not devices:
        if output is not None:
            raise UsageError("output_device needs device_ids")
        return (), None
    where = sorted({str(tensor.device) for tensor in tensors})
    if where != [str(devices[0])]:
        raise UsageError(
            f"with device_ids={list(map(str, devices))} the whole module must be on {devices[0]}, but it is "
            f"on {', '.join(where)}; move it there, or omit device_ids for a module on several devices"
        )
    if len(devices) == 1 and output not in (None, devices[0]):
        raise UsageError(
            f"output_device={output} differs from the only device in device_ids, {devices[0]}: outputs stay "
            "where the module puts them"
        )
    return devices, output or devices[0]


class Copies:
    """The copies of a module (``modules``), the first of which is the module itself.

    Args:
        devices: one for each copy; the module is on the first.
        dim: the dimension along which tensors are split and concatenated.
        param_dtype, buffer_dtype: the dtypes of floating-point tensors in all copies but the first.

    Raises UsageError if the module cannot be copied.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        output_device: torch.device,
        dim: int,
        *,
        param_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_scripted(module, "device_ids with several devices")
        self._devices = tuple(devices)
        self._output_device = output_device
        self._dim = dim
        self.modules = (
            module,
            *(_copied(module, device, param_dtype, buffer_dtype) for device in devices[1:]),
        )
        #: Number of copies used in the last forward pass.
        self.used_copies = 0
        self._mirror = Mirror(
            list(module.parameters()), [list(other.parameters()) for other in self.modules[1:]]
        )
        #: For each submodule its counterparts in all copies.
        self._parts = list(zip(*(one.modules() for one in self.modules), strict=True))

    def __call__(self, run_first: Callable[..., Any], args: Any, kwargs: Any, step: int) -> Any:
        """Run a batch through the copies, the first with ``run_first`` in the calling thread.

        ``step`` is the number of reduced passes so far.  Raises UsageError if inputs cannot be split or
        outputs cannot be concatenated, and exceptions of copies, with a note that names the copy.
        """
        parts = split_batch((args, kwargs), self._devices, self._dim)
        self.used_copies = len(parts)
        self._refresh(step)
        outputs = self._run(run_first, parts)
        return concatenate_outputs(outputs, self._output_device, self._dim)

    # -- refreshing ------------------------------------------------------------------------------

    def _refresh(self, step: int) -> None:
        self._mirror.refresh(step)
        with torch.no_grad():
            for first, *others in self._parts:
                for other, device in zip(others, self._devices[1:], strict=True):
                    if other.training != first.training:
                        other.training = first.training
                    for name, buffer in first._buffers.items():
                        _copy_buffer(other._buffers, name, buffer, device)

    # -- running ---------------------------------------------------------------------------------

    def _run(self, run_first: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
        functions: list[Callable[..., Any]] = [run_first, *self.modules[1:]]
        if len(parts) == 1:
            return [self._attempt(functions[0], parts[0], 0)]
        with ThreadPoolExecutor(len(parts) - 1, thread_name_prefix="shoal-copy") as pool:
            later = [
                pool.submit(_ThreadSettings(self._devices[i]).run, self._attempt, functions[i], parts[i], i)
                for i in range(1, len(parts))
            ]
            first = self._attempt(functions[0], parts[0], 0)
        return [first, *(future.result() for future in later)]

    def _attempt(self, function: Callable[..., Any], part: Any, index: int) -> Any:
        args, kwargs = part
        try:
            return function(*args, **kwargs)
        except Exception as error:
            which = f"copy {index} of {len(self._devices)} on {self._devices[index]}"
            _annotate(error, f"raised in {which}")
            raise


class _ThreadSettings:
    """Thread-local settings of torch, transferred from the calling thread to that of a copy."""

    def __init__(self, device: torch.device) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        kinds = {"cpu", device.type}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        ]
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``; the thread must not be used for anything else afterwards."""
        with torch.inference_mode(self._inference):
            torch.set_grad_enabled(self._grad)
            torch.set_autocast_cache_enabled(self._cache)
            for kind, enabled, dtype in self._autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            if self._stream is not None:
                torch.accelerator.set_stream(self._stream)
            return function(*args)


def _copied(
    module: nn.Module, device: torch.device, param_dtype: torch.dtype | None, buffer_dtype: torch.dtype | None
) -> nn.Module:
    try:
        other = copy.deepcopy(module)
    except Exception as error:
        raise UsageError(
            f"{type(module).__name__} cannot be copied to further devices, because copy.deepcopy fails: "
            f"{text_of(error)}"
        ) from error
    for parameter in other.parameters():
        parameter.grad = None
        parameter.data = parameter.data.to(device, param_dtype if parameter.is_floating_point() else None)
    for owner in other.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device, buffer_dtype if buffer.is_floating_point() else None)
    return other


def _copy_buffer(
    places: dict[str, torch.Tensor | None], name: str, buffer: torch.Tensor | None, device: torch.device
) -> None:
    """Copy one buffer of the first copy to another copy, in every forward pass, since copies change theirs.

    Autograd must not detect it: it may have saved the buffer earlier, with an equal value if not in training.
    """
    own = places.get(name)
    if buffer is None:
        places[name] = None
    elif own is None or own.shape != buffer.shape:  # the module replaced its buffer
        places[name] = buffer.to(device, None if own is None else own.dtype, copy=True)
    else:
        own.data.copy_(buffer)


def _annotate(error: Exception, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


# -- splitting batches and concatenating outputs -------------------------------------------------


def is_packed(part: Any) -> bool:
    """Whether ``part`` is a PackedSequence, which is a tuple but must be kept whole."""
    return issubclass(type(part), PackedSequence)


def move_to(structure: Any, device: torch.device) -> Any:
    """Return ``structure`` with all its tensors on ``device``."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf.to(device=device)  # type: ignore[call-arg]
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(moved, structure, is_packed)


def split_batch(structure: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Split the tensors in tuples, lists and dicts into one part for each device, or fewer for small batches.

    Raises UsageError if a tensor cannot be split along ``dim``, or not into as many parts as the others.
    """
    tree = Tree(structure, is_packed)
    leaves = tree.leaves
    cut = [_chunks(leaf, len(devices), dim) for leaf in leaves]
    numbers = {len(chunks) for chunks in cut if chunks}
    if len(numbers) > 1:
        shapes = [list(leaf.shape) for leaf, chunks in zip(leaves, cut, strict=True) if chunks]
        raise UsageError(
            f"input tensors of shapes {shapes} cannot be split along dim={dim} into equally many parts for "
            f"{len(devices)} copies of the model; pass tensors that are not part of the batch in another way "
            "(as a buffer, for example)"
        )
    (number,) = numbers or {1}
    return [
        move_to(
            tree.build([chunks[i] if chunks else leaf for leaf, chunks in zip(leaves, cut, strict=True)]),
            devices[i],
        )
        for i in range(number)
    ]


def _chunks(leaf: Any, most: int, dim: int) -> list[torch.Tensor]:
    """Split one input; return an empty list if all copies get it unchanged."""
    if isinstance(leaf, PackedSequence):
        raise UsageError(
            "a PackedSequence cannot be split among copies of a model; let the model pack its sequences"
        )
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        return []
    if not -leaf.ndim <= dim < leaf.ndim:
        raise UsageError(f"an input tensor of shape {list(leaf.shape)} has no dim={dim} to split")
    length = leaf.shape[dim]
    size = max(1, -(-length // most))
    # not chunk(), because its results must not be written to
    return [leaf.narrow(dim, start, min(size, length - start)) for start in range(0, length or 1, size)]


def concatenate_outputs(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Concatenate the tensors in the outputs of the copies along ``dim``, on ``device``.

    Raises UsageError if outputs differ in more than tensors, or contain objects other than tensors.
    """
    trees = [Tree(output) for output in outputs]
    if any(tree.form != trees[0].form for tree in trees):
        raise UsageError(
            "the copies of the model returned structures that differ: "
            + ", ".join(f"copy {i}: {tree}" for i, tree in enumerate(trees))
        )
    together = zip(*(tree.leaves for tree in trees), strict=True)
    return trees[0].build([_concatenated(leaves, device, dim) for leaves in together])


def _concatenated(leaves: Sequence[Any], device: torch.device, dim: int) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        moved = [leaf.to(device) for leaf in leaves]
        return torch.stack(moved) if first.ndim == 0 else torch.cat(moved, dim)
    if first is None or isinstance(first, (bool, int, float, complex, str, bytes)):
        if all(leaf == first for leaf in leaves):
            return first
        raise UsageError(
            f"the copies of the model returned {', '.join(map(repr, leaves))}: only tensors can be joined"
        )
    raise UsageError(
        f"the model returned an object of type {type(first).__name__}; outputs of several copies must be "
        "tensors, or tuples, lists and dicts of tensors"
    )
