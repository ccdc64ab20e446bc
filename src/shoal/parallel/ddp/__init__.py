"""DistributedDataParallel: the wrapper of a model, and its features beyond the reduction of gradients."""

from .mixed_precision import MixedPrecision
from .module import DistributedDataParallel

__all__ = ["DistributedDataParallel", "MixedPrecision"]
