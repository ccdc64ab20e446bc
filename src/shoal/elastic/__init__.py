"""Elastic training: a session continues when processes fail, and new processes can join it."""

from .loader import Loader
from .membership.members import Resize
from .samples import Samples
from .session import Session
from .state.state import State
from .step import Attempt, Step

__all__ = ["Attempt", "Loader", "Resize", "Samples", "Session", "State", "Step"]
