"""Data-parallel training: one gradient reducer for every backend and device."""

from .ddp import DistributedDataParallel
from .join import Join, Joinable, JoinHook
from .zero import ZeroRedundancyOptimizer

__all__ = ["DistributedDataParallel", "Join", "JoinHook", "Joinable", "ZeroRedundancyOptimizer"]
