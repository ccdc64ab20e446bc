"""Data-parallel training: one gradient reducer for every backend and device."""

from .averaging import HierarchicalModelAverager, PeriodicModelAverager
from .ddp import DistributedDataParallel
from .join import Join, Joinable, JoinHook
from .local_sgd_optimizer import PostLocalSGDOptimizer
from .mixed import MixedPrecision
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
