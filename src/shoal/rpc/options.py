"""What torch's ``init_rpc`` takes beside names and numbers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from .. import config
from ..errors import UnsupportedOperation


class BackendType(enum.Enum):
    """Torch's names of the ways in which calls travel; here all of them mean shoal's own."""

    TENSORPIPE = "tensorpipe"


class TensorPipeRpcBackendOptions:
    """Settings of :func:`init_rpc`, under the name that torch gives to them.

    Attributes:
        num_worker_threads: without a meaning: as many handlers run at once as calls need.
        rpc_timeout: seconds that a call may take unless it says otherwise; 0: as long as it takes.
            ``SHOAL_RPC_TIMEOUT`` unless given.
        init_method: where the workers meet: ``env://``, ``tcp://host:port``, ``file:///path``, or another URL
            of :func:`shoal.init`.
        device_maps, devices: must be empty: tensors of an accelerator travel as ``x.cpu()``.
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
        _refuse_devices(device_maps)
        _refuse_devices(devices)
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = config.RPC_TIMEOUT.get() if rpc_timeout is None else rpc_timeout
        self.init_method = init_method
        self.device_maps: dict[str, Any] = {}
        self.devices: list[Any] = []

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Refuse a map.

        Raises:
            UnsupportedOperation: it is not empty.
        """
        _refuse_devices(device_map)

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Refuse devices.

        Raises:
            UnsupportedOperation: there are some.
        """
        _refuse_devices(devices)


def _refuse_devices(devices: object) -> None:
    if devices:
        raise UnsupportedOperation(
            f"devices of shoal.rpc: {devices!r}: tensors of an accelerator are not sent: leave "
            "device_maps= and devices= out, send x.cpu(), and move what arrives"
        )
