"""DistributedDataParallel: the module around a model, and what it does beside reducing gradients."""

from .mixed_precision import MixedPrecision
from .module import DistributedDataParallel

__all__ = ["DistributedDataParallel", "MixedPrecision"]
