"""Several copies of a model in one process, each on its own device, with one batch split among them.

Every forward pass splits its tensors along one dimension, runs each part through one copy in a separate
thread, and concatenates the outputs.  The reducer sums the gradients of the copies, so the process acts like
one rank with the whole batch.  The first copy is the model itself: its parameters are trained and its buffers
are kept; the other copies are refreshed from it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ...common.wording import text_of
from ...errors import UsageError
from .batch_parts import concatenate_outputs, split_batch
from .members import refuse_scripted
from .mirror import Mirror

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
    """The copies of a module, the first of which is the module itself.

    Args:
        devices: one for each copy; the module is on the first.
        output_device: the device of the concatenated outputs.
        dim: the dimension along which tensors are split and concatenated.
        param_dtype: the dtype of floating-point parameters of all copies but the first.
        buffer_dtype: the dtype of their floating-point buffers.

    Attributes:
        modules: the copies.
        ran: number of copies used in the last forward pass.

    Raises:
        UsageError: the module cannot be copied.
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
        self.ran = 0
        self._mirror = Mirror(
            list(module.parameters()), [list(other.parameters()) for other in self.modules[1:]]
        )
        #: For each submodule its counterparts in all copies.
        self._parts = list(zip(*(one.modules() for one in self.modules), strict=True))

    def __call__(self, run_first: Callable[..., Any], args: Any, kwargs: Any, step: int) -> Any:
        """Run a batch through the copies.

        Args:
            run_first: runs the first copy, in the calling thread.
            step: number of reduced passes so far.

        Raises:
            UsageError: inputs cannot be split or outputs cannot be concatenated.
            Exception: an exception of a copy, with a note that names the copy.
        """
        parts = split_batch((args, kwargs), self._devices, self._dim)
        self.ran = len(parts)
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
                        _follow(other._buffers, name, buffer, device)

    # -- running ---------------------------------------------------------------------------------

    def _run(self, run_first: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
        functions: list[Callable[..., Any]] = [run_first, *self.modules[1:]]
        if len(parts) == 1:
            return [self._attempt(functions[0], parts[0], 0)]
        with ThreadPoolExecutor(len(parts) - 1, thread_name_prefix="shoal-copy") as pool:
            later = [
                pool.submit(_Settings(self._devices[i]).run, self._attempt, functions[i], parts[i], i)
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


class _Settings:
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
    module: nn.Module,
    device: torch.device,
    param_dtype: torch.dtype | None,
    buffer_dtype: torch.dtype | None,
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


def _follow(
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
