"""Process groups, which validate, number, record and dispatch operations; the only caller of backends."""

from .agreement import Agreement
from .batch import Batch
from .point_to_point import Message
from .process_group import ProcessGroup
from .rebuild import Rebuilt

__all__ = ["Agreement", "Batch", "Message", "ProcessGroup", "Rebuilt"]
