"""The gradient reducer, which averages the gradients of a model over a group during backward."""

from .gradients import ReducerOptions
from .reducer import Reducer

__all__ = ["Reducer", "ReducerOptions"]
