"""The NCCL library as an engine, and the backend ``nccl``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

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

    Args:
        high_priority: whether the streams of communicators have high priority.
    """

    name = "NCCL"
    device = "cuda"
    early = True
    captures = True

    def __init__(self, membership: Membership, *, high_priority: bool = False) -> None:
        self._nccl = self.library(membership.rank)
        self._high_priority = high_priority

    def library(self, rank: int) -> Nccl:
        """The library, on a machine that can use it."""
        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"rank {rank}: backend='nccl' needs a CUDA device, and torch {torch.__version__} finds none; "
                "use backend='native' for tensors on the CPU"
            )
        if os.environ.get("NCCL_COMM_BLOCKING", "0") != "0":
            raise ConfigurationError(
                f"rank {rank}: backend='nccl' needs nonblocking communicators; unset NCCL_COMM_BLOCKING"
            )
        return load()

    def prepare_thread(self, device: torch.device) -> None:
        runtime_of(device).prepare_thread(device)

    def communicator(self, setup: Setup) -> Communicator:
        runtime = runtime_of(setup.device)
        return NcclCommunicator(
            self._nccl, setup, runtime, lambda: runtime.stream_from_pool(setup.device, self._high_priority)
        )


class NcclBackend(SupervisedBackend):
    """Moves tensors on CUDA devices by NCCL; everything else is the native backend's, with its options.

    Args:
        high_priority: whether collectives run on streams with high priority.
    """

    name = "nccl"
    engine_type: ClassVar[type[NcclEngine]] = NcclEngine

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
        **options: Any,
    ) -> None:
        self._high_priority = high_priority
        super().__init__(membership, timeout=timeout, **options)

    def make_engine(self, membership: Membership) -> Engine:
        return self.engine_type(membership, high_priority=self._high_priority)
