"""An optimiser with its state distributed over the ranks."""

from .optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
