"""The options of ``init_rpc``, with torch's names."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import config
from ..errors import UsageError
from .connection.device_maps import checked_device, checked_pairs


class BackendType(enum.Enum):
    """Torch's names of RPC backends; all of them select shoal's."""

    TENSORPIPE = "tensorpipe"


class TensorPipeRpcBackendOptions:
    """Settings of :func:`init_rpc`, under torch's name.

    Attributes:
        num_worker_threads: maximum number of handlers that run at once; values below 512 mean 512.
        rpc_timeout: default timeout of a call in seconds; 0: no limit.  Default: ``SHOAL_RPC_TIMEOUT``.
        init_method: URL of the rendezvous: ``env://``, ``tcp://host:port``, ``file:///path``, or another URL
            of :func:`shoal.init`.
        device_maps: see :func:`shoal.rpc.join`.
        devices: ignored: the device maps determine the devices of tensors.
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
        """Add one-to-one pairs (device here -> device at the worker ``to``) to the map for that worker.

        Raises:
            UsageError: the map is invalid, or the combined map would not be one-to-one.
        """
        known = self.device_maps.get(to, {})
        wanted = checked_pairs(device_map, f"set_device_map({to!r})")
        for here, there in wanted.items():
            if known.get(here, there) != there:
                raise UsageError(
                    f"set_device_map({to!r}): {here} is already mapped to {known[here]}, got {there}: "
                    "only a 1-to-1 mapping can be inverted for results"
                )
        self.device_maps[to] = checked_pairs({**known, **wanted}, f"set_device_map({to!r})")

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Store ``devices`` in :attr:`devices`.

        Raises:
            UsageError: one of them is not a device.
        """
        self.devices = [checked_device(device, "set_devices") for device in devices]
