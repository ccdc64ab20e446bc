"""The NCCL library as an engine, and the backend ``nccl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import ConfigurationError, UsageError
from ...rendezvous.membership import Membership
from ...streams import runtime_of
from ..engine import Communicator, Engine, Setup
from ..supervised import SupervisedBackend
from .communicator import NcclCommunicator
from .library import Nccl, load


class NcclEngine(Engine):
    """The NCCL library of this process.

    Attributes:
        high_priority: whether the streams of new communicators have high priority.
    """

    name = "NCCL"
    device = "cuda"
    early = True
    high_priority = False

    def __init__(self, membership: Membership) -> None:
        self._nccl = self.library(membership.rank)

    def library(self, rank: int) -> Nccl:
        """The library, on a machine that can use it."""
        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"rank {rank}: backend='nccl' needs a CUDA device, and torch {torch.__version__} finds none; "
                "use backend='native' for tensors on the CPU"
            )
        return load()

    def communicator(self, setup: Setup) -> Communicator:
        runtime = runtime_of(setup.device)
        stream = runtime.stream_from_pool(setup.device, self.high_priority)
        return NcclCommunicator(self._nccl, setup, runtime, stream)


class NcclBackend(SupervisedBackend):
    """Moves tensors on CUDA devices by NCCL; everything else is the native backend's, with its options.

    Args:
        high_priority: whether collectives run on streams with high priority.
    """

    name = "nccl"
    engine_type = NcclEngine

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        if not isinstance(options.get("high_priority", False), bool):
            raise UsageError(f"high_priority must be True or False, got {options['high_priority']!r}")

    def __init__(
        self,
        membership: Membership,
        *,
        timeout: float,
        high_priority: bool = False,
        transport: str | None = None,
        heartbeat_timeout: float | None = None,
        shared_memory_limit: int | None = None,
    ) -> None:
        super().__init__(
            membership,
            timeout=timeout,
            transport=transport,
            heartbeat_timeout=heartbeat_timeout,
            shared_memory_limit=shared_memory_limit,
        )
        assert isinstance(self.engine, NcclEngine)
        self.engine.high_priority = high_priority
