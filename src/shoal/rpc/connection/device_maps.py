"""Device maps: for each device of a caller, the corresponding device of the callee.

    join("trainer", device_maps={"ps": {"cuda:0": "cuda:1"}})

In calls from "trainer" to "ps", a tensor on the first device arrives on the second; in replies, a tensor on
the second device arrives on the first.  The caller sends its map in the hello of each connection for its
calls, so the two workers have separate maps for their calls to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import UnsupportedOperation, UsageError
from ...streams import runtime_of
from .directory import checked_name

#: name of a callee -> map from devices here to devices there; names or ``torch.device``
DeviceMaps = Mapping[str, Mapping[Any, Any]]

_CPU = torch.device("cpu")


class DeviceMap:
    """The device map of one end of a connection.

    Args:
        pairs: one-to-one map from devices at this end to devices at the other end.
        inverse: whether this end is the callee.

    Attributes:
        here: the devices of this end that have streams.
        maps_cpu: whether CPU tensors arrive on another device.
    """

    def __init__(
        self, pairs: Mapping[torch.device, torch.device], caller: str, callee: str, *, inverse: bool = False
    ) -> None:
        self._pairs = dict(pairs)
        self._caller = caller
        self._callee = callee
        self._inverse = inverse
        self.here = tuple(device for device in self._pairs if device != _CPU)
        self.maps_cpu = self._pairs.get(_CPU, _CPU) != _CPU

    def target(self, x: torch.Tensor) -> torch.device:
        """Return the device of ``x`` at the other end; raise UsageError if it is unmapped and not the CPU."""
        found = self._pairs.get(x.device)
        if found is not None:
            return found
        if x.device == _CPU:
            return _CPU
        raise UsageError(unmapped(x, self._caller, self._callee, self._inverse))

    def as_text(self) -> dict[str, str]:
        """Return the map as text for the hello of a connection."""
        return {str(here): str(there) for here, there in self._pairs.items()}


def unmapped(x: torch.Tensor, caller: str, callee: str, result: bool) -> str:
    """Return the error message for a tensor on an unmapped device; ``result``: it is in a reply."""
    device = str(x.device)
    which = (
        f"to which {caller!r} maps none of its devices" if result else f"which has no device of {callee!r}"
    )
    suggested = {callee: {device: device}}
    return (
        f"a tensor of shape {tuple(x.shape)} is on {device}, {which}: send x.cpu(), or join {caller!r} "
        f"with device_maps={suggested}"
    )


def checked(device_maps: object, caller: str) -> dict[str, DeviceMap]:
    """Convert the argument ``device_maps`` of :func:`shoal.rpc.join` to a map for each callee.

    Raises UsageError if it is invalid, a device of this end does not exist, or a map is not one-to-one.
    """
    if device_maps is None:
        return {}
    if not isinstance(device_maps, Mapping):
        raise UsageError(f"device_maps={device_maps!r}: expected {{worker: {{device here: device there}}}}")
    result = {}
    for callee, pairs in device_maps.items():
        where = f"device_maps[{callee!r}]"
        devices = checked_pairs(pairs, where)
        for device in devices:
            _require(device, where)
        result[checked_name(callee)] = DeviceMap(devices, caller, callee)
    return result


def checked_pairs(pairs: object, where: str) -> dict[torch.device, torch.device]:
    """Convert the map for one callee, without checking whether its devices exist.

    Raises UsageError, which begins with ``where``, if it is invalid or not one-to-one.
    """
    if not isinstance(pairs, Mapping):
        raise UsageError(f"{where}={pairs!r}: expected {{device here: device there}}")
    result: dict[torch.device, torch.device] = {}
    for name, target in pairs.items():
        here, there = checked_device(name, where), checked_device(target, where)
        if here in result:
            raise UsageError(f"{where} names {here} twice")
        twice = next((other for other, known in result.items() if known == there), None)
        if twice is not None:
            raise UsageError(
                f"{where} maps {twice} and {here} to {there}: only a 1-to-1 mapping can be inverted for "
                "results"
            )
        result[here] = there
    return result


def inverse(words: Mapping[str, str], caller: str, callee: str) -> DeviceMap | None:
    """Invert the map ``words`` from the hello of ``caller``, for replies of this worker; None: no map.

    Raises UsageError if this worker does not have one of the devices.
    """
    if not words:
        return None
    where = f"device_maps[{callee!r}] of {caller!r}"
    pairs = {checked_device(there, where): checked_device(here, where) for here, there in words.items()}
    for device in pairs:
        _require(device, where)
    return DeviceMap(pairs, caller, callee, inverse=True)


def checked_device(name: object, where: str) -> torch.device:
    """Convert ``name`` to a device, without checking whether it exists.

    Raises UsageError, which begins with ``where``, if it is not a device or has no index.
    """
    try:
        device = torch.device(name) if isinstance(name, (str, int)) else name
    except RuntimeError as error:
        raise UsageError(f"{where}: {name!r} is not a device: {str(error).splitlines()[0]}") from None
    if not isinstance(device, torch.device):
        raise UsageError(f"{where}: {name!r} is not a device; expected a name such as 'cuda:0'")
    if device.type == "cpu":
        return _CPU
    if device.index is None:
        raise UsageError(f"{where}: {device} has no index; expected a name such as '{device.type}:0'")
    return device


def _require(device: torch.device, where: str) -> None:
    """Raise UsageError for a device that this process does not have."""
    if device == _CPU:
        return
    try:
        runtime_of(device)
        count = torch.get_device_module(device).device_count()
    except UnsupportedOperation as error:
        raise UsageError(f"{where}: {error}") from None
    except RuntimeError:  # torch has no module for this type of device
        count = 0
    if device.index is None or device.index >= count:
        raise UsageError(f"{where}: this worker has no {device}; it has {count} of {device.type}")
