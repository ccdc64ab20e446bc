"""Training that goes on through deaths: a dead process costs one step."""

from .attempt import Attempt
from .data.loader import Loader
from .resize import Resize
from .samples import Samples
from .session import Session
from .state.state import State
from .step import Step

__all__ = ["Attempt", "Loader", "Resize", "Samples", "Session", "State", "Step"]
