"""Elastic training: a session continues when processes fail, and new processes can join it."""

from .attempt import Attempt
from .data.loader import Loader
from .resize import Resize
from .samples import Samples
from .session import Session
from .state.state import State
from .step import Step

__all__ = ["Attempt", "Loader", "Resize", "Samples", "Session", "State", "Step"]
