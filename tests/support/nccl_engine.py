"""The backend "fake-nccl": shoal's NCCL engine over a FakeNccl and the pretended device."""

from __future__ import annotations

from typing import ClassVar

from shoal.backend.nccl.engine import NcclBackend, NcclEngine
from shoal.backend.nccl.library import Nccl
from shoal.backend.registry import register_backend

from .fake_nccl import FakeNccl
from .pretend_device import PretendRuntime


class FakeNcclEngine(NcclEngine):
    """The engine with another library.

    Attributes:
        fake: the library of this process.
    """

    device = "pretend"
    fake: ClassVar[FakeNccl]

    def library(self, rank: int) -> Nccl:
        return self.fake


class FakeNcclBackend(NcclBackend):
    name = "fake-nccl"
    engine_type = FakeNcclEngine


def use_fake_nccl(runtime: PretendRuntime) -> None:
    """Register the backend, once in a process."""
    FakeNcclEngine.fake = FakeNccl(runtime)
    register_backend("fake-nccl", FakeNcclBackend)
