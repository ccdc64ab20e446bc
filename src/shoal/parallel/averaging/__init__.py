"""Model averaging: ranks train by themselves for some steps and then average their parameters."""

from .averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
from .parameters import Parameters, average_parameters
from .post_local_sgd import PostLocalSGDOptimizer

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "Parameters",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "average_parameters",
]
