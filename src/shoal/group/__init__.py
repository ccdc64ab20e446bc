"""Process groups, which validate, number, record and dispatch operations; the only caller of backends."""

from ..backend.agreement import AgreementOp
from ..spec import FailureScope, GroupState
from .agreement import Agreement
from .batch import Batch
from .diagnostics.profiler_traces import profiler_handler
from .operations import Message
from .process_group import ProcessGroup
from .rebuild import Rebuilt

__all__ = [
    "Agreement",
    "AgreementOp",
    "Batch",
    "FailureScope",
    "GroupState",
    "Message",
    "ProcessGroup",
    "Rebuilt",
    "profiler_handler",
]
