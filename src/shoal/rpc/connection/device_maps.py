"""Maps of devices: each device of a caller stands for one of the worker that it calls.

    join("trainer", device_maps={"ps": {"cuda:0": "cuda:1"}})

A tensor on the first device, in a call of "trainer" to "ps", arrives there on the second; a tensor on the
second, in the reply, comes back on the first.  The caller says its map in the hello of each connection for
its calls, so each direction of calling has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import UnsupportedOperation, UsageError
from ...streams import runtime_of
from .directory import checked_name

#: of each worker that is called, the device there for each device here, by names or as such
DeviceMaps = Mapping[str, Mapping[Any, Any]]

_CPU = torch.device("cpu")


class DeviceMap:
    """Where the tensors go that leave one end of a connection.

    Args:
        pairs: the device at the other end for each one at this end, one to one.
        caller, callee: whose connection it is.
        inverse: whether this end is the callee.

    Attributes:
        here: the devices of this end that have streams.
        maps_cpu: whether tensors of the CPU go to a device.
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
        """The device at the other end for a tensor, that of the CPU being the other CPU if nothing is said.

        Raises:
            UsageError: the map has none.
        """
        found = self._pairs.get(x.device)
        if found is not None:
            return found
        if x.device == _CPU:
            return _CPU
        raise UsageError(unmapped(x, self._caller, self._callee, self._inverse))

    def words(self) -> dict[str, str]:
        """The map as the hello of a connection has it."""
        return {str(here): str(there) for here, there in self._pairs.items()}


def unmapped(x: torch.Tensor, caller: str, callee: str, result: bool) -> str:
    """Why a tensor cannot be sent, and what would change that.

    Args:
        result: whether it is in the reply.
    """
    device = str(x.device)
    which = (
        f"to which {caller!r} maps no device of its own" if result else f"which has no device of {callee!r}"
    )
    suggested = {callee: {device: device}}
    return (
        f"a tensor of shape {tuple(x.shape)} lies on {device}, {which}: send x.cpu(), or join {caller!r} "
        f"with device_maps={suggested}"
    )


def checked(device_maps: object, caller: str) -> dict[str, DeviceMap]:
    """The argument ``device_maps`` of :func:`shoal.rpc.join`: a map for each worker that it names.

    Raises:
        UsageError: it is no such thing, a device of this end is not there, or a map is not one to one.
    """
    if device_maps is None:
        return {}
    if not isinstance(device_maps, Mapping):
        raise UsageError(f"device_maps={device_maps!r}: expected {{worker: {{device here: device there}}}}")
    return {checked_name(callee): _checked(pairs, caller, callee) for callee, pairs in device_maps.items()}


def _checked(pairs: object, caller: str, callee: str) -> DeviceMap:
    where = f"device_maps[{callee!r}]"
    result = checked_pairs(pairs, where)
    for device in result:
        _require(device, where)
    return DeviceMap(result, caller, callee)


def checked_pairs(pairs: object, where: str) -> dict[torch.device, torch.device]:
    """One worker's map, whose devices need not be here.

    Raises:
        UsageError: it is none, or not one to one; begins with ``where``.
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
    """The map for replies of ``callee``, this worker, to ``caller``, whose hello has ``words``; None: no map.

    Raises:
        UsageError: this worker has no such device.
    """
    if not words:
        return None
    where = f"device_maps[{callee!r}] of {caller!r}"
    pairs = {checked_device(there, where): checked_device(here, where) for here, there in words.items()}
    for device in pairs:
        _require(device, where)
    return DeviceMap(pairs, caller, callee, inverse=True)


def checked_device(name: object, where: str) -> torch.device:
    """The device that ``name`` means, which need not be here.

    Raises:
        UsageError: it means none, or leaves its number open; begins with ``where``.
    """
    try:
        device = torch.device(name) if isinstance(name, (str, int)) else name
    except RuntimeError as error:
        raise UsageError(f"{where}: {name!r} is no device: {str(error).splitlines()[0]}") from None
    if not isinstance(device, torch.device):
        raise UsageError(f"{where}: {name!r} is no device; expected a name such as 'cuda:0'")
    if device.type == "cpu":
        return _CPU
    if device.index is None:
        raise UsageError(f"{where}: {device} has no index; expected a name such as '{device.type}:0'")
    return device


def _require(device: torch.device, where: str) -> None:
    """Refuse a device that this process does not have."""
    if device == _CPU:
        return
    try:
        runtime_of(device)
        count = torch.get_device_module(device).device_count()
    except UnsupportedOperation as error:
        raise UsageError(f"{where}: {error}") from None
    except RuntimeError:  # torch knows the type of device, but has no module for it here
        count = 0
    if device.index is None or device.index >= count:
        raise UsageError(f"{where}: there is no {device} at this worker, which has {count} of {device.type}")
