"""The options that torch's ``init_rpc`` takes beside names and numbers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import config
from ..errors import UsageError
from .connection.device_maps import checked_device, checked_pairs


class BackendType(enum.Enum):
    """Torch's names of the ways in which calls travel; here all of them mean shoal's own."""

    TENSORPIPE = "tensorpipe"


class TensorPipeRpcBackendOptions:
    """Settings of :func:`init_rpc`, under the name that torch gives to them.

    Attributes:
        num_worker_threads: how many handlers run at once, which is never less than 512.
        rpc_timeout: seconds that a call may take unless it says otherwise; 0: as long as it takes.
            ``SHOAL_RPC_TIMEOUT`` unless given.
        init_method: where the workers meet: ``env://``, ``tcp://host:port``, ``file:///path``, or another URL
            of :func:`shoal.init`.
        device_maps: as of :func:`shoal.rpc.join`.
        devices: without a meaning: tensors go to the devices that the maps name.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float | None = None,
        init_method: str = "env://",
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: object = None,
        _channels: object = None,
    ) -> None:
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = config.RPC_TIMEOUT.get() if rpc_timeout is None else rpc_timeout
        self.init_method = init_method
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or ())

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Say to which device of the worker ``to`` the tensors of each device of this one go, one to one.

        What was said before for the same worker stays.

        Raises:
            UsageError: it is no such map, or two devices would go to one, or one to two.
        """
        known = self.device_maps.get(to, {})
        wanted = checked_pairs(device_map, f"set_device_map({to!r})")
        for here, there in wanted.items():
            if known.get(here, there) != there:
                raise UsageError(
                    f"set_device_map({to!r}): {here} goes to {known[here]} already, and not to {there} too: "
                    "only a 1-to-1 mapping can be inverted for results"
                )
        self.device_maps[to] = checked_pairs({**known, **wanted}, f"set_device_map({to!r})")

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Take note of devices.

        Raises:
            UsageError: one of them is none.
        """
        self.devices = [checked_device(device, "set_devices") for device in devices]
