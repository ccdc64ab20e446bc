"""An optimiser whose state is distributed over the ranks."""

from .optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
