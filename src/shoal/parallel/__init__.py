"""Data-parallel training: one gradient reducer for every backend and device."""

from .averaging import HierarchicalModelAverager, PeriodicModelAverager, PostLocalSGDOptimizer
from .ddp import DistributedDataParallel, MixedPrecision
from .join import Join, Joinable, JoinHook
from .zero import ZeroRedundancyOptimizer

__all__ = [
    "DistributedDataParallel",
    "HierarchicalModelAverager",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
]
