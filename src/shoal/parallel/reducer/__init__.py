"""The gradient reducer: averages the gradients of a model over a group while backward still runs."""

from .gradients import ReducerOptions
from .reducer import Reducer

__all__ = ["Reducer", "ReducerOptions"]
