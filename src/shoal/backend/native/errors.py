"""Errors of the core, and of the system below it, as exceptions that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
from .mesh import lacking

#: by code, as in enum ErrorCode of cpp/transport/frame.h
_ERRORS: dict[int, type[GroupError]] = {
    1: PeerLost,
    2: CollectiveMismatch,
    3: OperationTimeout,
    4: GroupAborted,
    5: GroupClosed,
    6: OutOfSharedMemory,
    7: ForkedProcess,
    8: ProtocolError,
    9: OperationCancelled,
}
_OF_RANKS = (PeerLost, OperationTimeout, ProtocolError)


def error_of(error: tuple[int, str, list[int], int] | None) -> GroupError | None:
    """The exception for an error of the core: (code, text, ranks, last operation completed, or -1)."""
    if error is None:
        return None
    code, text, ranks, completed = error
    kind = _ERRORS.get(code, GroupError)
    raised = kind(text, ranks) if issubclass(kind, _OF_RANKS) else kind(text)
    if completed >= 0:
        raised.last_completed = completed
    return raised


@contextlib.contextmanager
def limits(what: str) -> Iterator[None]:
    """Tell what ran out, and what to do about it, where the system or a limit refuses more."""
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
        lack = lacking(error)
        if lack is None and isinstance(error, ShoalError):
            raise
        raise OutOfResources(
            f"{what}: {(lack or error).strerror or error}.  Each rank needs a few descriptors for every "
            "other rank, and two threads: raise the limits of the process (ulimit -n, ulimit -u) or machine"
        ) from error
