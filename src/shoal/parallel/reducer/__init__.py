"""The gradient reducer, which averages the gradients of a model over a group during backward."""

from .gradients import ReducerOptions
from .reducer import Participants, Reducer

__all__ = ["Participants", "Reducer", "ReducerOptions"]
