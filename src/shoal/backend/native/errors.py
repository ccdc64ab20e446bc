"""Conversion of errors of the core and of the system into shoal's exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import groupby

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

#: Texts that name their ranks: the table of a mismatch all of them, an abort its caller.
_NAMES_ITS_RANKS = (_core.ErrorCode.MISMATCH, _core.ErrorCode.ABORTED)

#: Errors that another rank can cause.
_CAUSED_BY_OTHERS = (_core.ErrorCode.PEER_LOST, _core.ErrorCode.ABORTED, _core.ErrorCode.CLOSED)


def exception_of(error: _core.Error | None, rank: int, group: str) -> GroupError | ForkedProcess | None:
    """Return the exception for an error of the core on `rank` of `group`."""
    if error is None:
        return None
    kind = _EXCEPTIONS[error.code]
    text = _text_of(error, rank, group)
    raised = kind(text, error.ranks) if issubclass(kind, _WITH_RANKS) else kind(text)
    if error.completed >= 0 and isinstance(raised, GroupError):
        raised.last_completed = error.completed
    return raised


def caused_by_others(error: _core.Error, rank: int) -> bool:
    """Whether other ranks than `rank` caused the error."""
    return error.code in _CAUSED_BY_OTHERS and rank not in error.ranks


def _text_of(error: _core.Error, rank: int, group: str) -> str:
    if not error.operation:
        return _cause(error, error.subject)
    completed = "no operation had completed here"
    if error.completed >= 0:
        completed = f"last operation completed here: {error.completed}"
    where = f"{error.operation} on rank {rank} of group '{group}' ({completed})"
    if error.subject == error.operation:
        return _cause(error, where)
    return f"{where} failed: {_cause(error, error.subject)}"


def _cause(error: _core.Error, subject: str) -> str:
    causes = []
    if error.text:
        text = f"{subject} {error.text}" if subject else error.text
        causes.append(text + _reported_by(-1 if error.code in _NAMES_ITS_RANKS else error.reporter))
    for reporter, losses in groupby(error.lost, key=lambda loss: loss.reporter):
        lost = "; ".join(f"rank {loss.rank} is lost: {loss.cause}" for loss in losses)
        causes.append(lost + _reported_by(reporter))
    text = "; ".join(causes)
    return f"{error.absence}; the others gave it up: {text}" if error.absence else text


def _reported_by(rank: int) -> str:
    return "" if rank < 0 else f" (reported by rank {rank})"


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
            "other rank, and two threads: raise the limits of the process (ulimit -n, ulimit -u) or machine"
        ) from error
