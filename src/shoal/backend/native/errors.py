"""Conversion of errors of the core and of the system into shoal's exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ... import _core
from ...errors import (
    CollectiveMismatch,
    ForkedProcess,
    GroupAborted,
    GroupClosed,
    GroupError,
    OperationCancelled,
    OperationTimeout,
    OutOfResources,
    OutOfSharedMemory,
    PeerLost,
    ProtocolError,
    ShoalError,
)
from ...net import resource_error

_EXCEPTIONS: dict[_core.ErrorCode, type[GroupError | ForkedProcess]] = {
    _core.ErrorCode.PEER_LOST: PeerLost,
    _core.ErrorCode.MISMATCH: CollectiveMismatch,
    _core.ErrorCode.TIMEOUT: OperationTimeout,
    _core.ErrorCode.ABORTED: GroupAborted,
    _core.ErrorCode.CLOSED: GroupClosed,
    _core.ErrorCode.OUT_OF_MEMORY: OutOfSharedMemory,
    _core.ErrorCode.FORKED: ForkedProcess,
    _core.ErrorCode.WIRE: ProtocolError,
    _core.ErrorCode.CANCELLED: OperationCancelled,
}
_WITH_RANKS = (PeerLost, OperationTimeout, ProtocolError)


def exception_of(error: _core.Error | None, rank: int, group: str) -> GroupError | ForkedProcess | None:
    """Return the exception for an error of the core on `rank` of `group`."""
    if error is None:
        return None
    kind = _EXCEPTIONS[error.code]
    text = error.explain(rank, group)
    raised = kind(text, error.ranks) if issubclass(kind, _WITH_RANKS) else kind(text)
    if error.completed >= 0 and isinstance(raised, GroupError):
        raised.last_completed = error.completed
    return raised


@contextlib.contextmanager
def explain_resource_errors(what: str) -> Iterator[None]:
    """Convert exhausted memory, descriptors or threads during ``what`` into errors that name the remedy."""
    try:
        yield
    except OutOfSharedMemory:
        raise
    except MemoryError as error:
        raise OutOfSharedMemory(
            f"{what}: {error}.  Free tensors of group.empty() or close groups; else raise the limit that was "
            "met: SHOAL_SHARED_MEMORY_LIMIT (or lower it, where address space is what lacks), the address "
            "space and file size of the process (ulimit -v, ulimit -f), the memory of its container"
        ) from None
    except OSError as error:
        lack = resource_error(error)
        if lack is None and isinstance(error, ShoalError):
            raise
        raise OutOfResources(
            f"{what}: {(lack or error).strerror or error}.  Each rank needs a few descriptors for every "
            "other rank, and at least two threads: raise the limits of the process (ulimit -n, ulimit -u) or "
            "machine"
        ) from error
