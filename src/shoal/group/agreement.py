"""Agreements of the surviving ranks on one value and on the set of survivors.

The channel implements the protocol (``cpp/consensus`` for the native backend).  This module converts values
to votes and decisions to values, and runs the *witness*: a key of the group's store, changed by
compare-and-set, which decides if exactly half of the ranks are left.  Only ranks that call ``agree`` use it.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .. import config
from ..backend.agreement import (
    AgreementOp,
    AgreementOutcome,
    AgreementState,
    PendingAgreement,
    WitnessRequest,
)
from ..backend.base import GroupSpec
from ..common.formatting import describe_error, format_seconds, ranks_named
from ..errors import (
    CollectiveMismatch,
    Evicted,
    GroupClosed,
    GroupError,
    OperationTimeout,
    QuorumLost,
    RebuildCalled,
)
from ..future import Future
from ..store import Store
from .submission import OperationSubmitter, run_in_callback_thread
from .validation.arguments import OperationCall

T_co = TypeVar("T_co", covariant=True)

#: the operations of ``ProcessGroup.agree``
_OPS = ("and", "or", "min", "max", "sum", "common", "gather")
_INTEGER = struct.Struct("<q")
_LENGTH = struct.Struct("<I")
_POLL_INTERVAL_S = 60.0  # seconds between two polls of an agreement without news
#: of the witness: timeout of one request, and delay before the next attempt, in seconds
_WITNESS_TIMEOUT_S = 2.0
_WITNESS_RETRY_DELAY_S = 0.1


class AgreementOpMismatch(GroupError):
    """Other ranks called another operation than ``rebuild``; the next call of this rank may match theirs."""


@dataclass(frozen=True, slots=True)
class Agreement(Generic[T_co]):
    """The result of ``agree``; the same on every rank that gets it.

    Attributes:
        value: the combined votes of ``ranks``: an integer; the integers that are in all votes, ascending
            (``"common"``); or the votes themselves, in the order of ``ranks`` (``"gather"``).
        ranks: the surviving ranks, ascending.
        lost: all other ranks of the group.
    """

    value: T_co
    ranks: tuple[int, ...]
    lost: tuple[int, ...]


class AgreementClient:
    """Votes in the agreements of a group.

    Args:
        submitter: of the group.
        store: of the group.
        report_evictions: reports the lost ranks of a decision, given those of them that have failed or left.
    """

    def __init__(
        self,
        submitter: OperationSubmitter,
        store: Store,
        report_evictions: Callable[[Sequence[int], Collection[int]], None],
    ) -> None:
        self._submitter = submitter
        self._store = store
        self._report_evictions = report_evictions

    def agree(
        self, call: OperationCall, value: Any, op: str, timeout: float | None
    ) -> Future[Agreement[Any]]:
        """See :meth:`shoal.ProcessGroup.agree`."""
        # Plus the time for late votes: otherwise all ranks time out before a late rank is excluded.
        default = self._submitter.timeout + config.VOTE_TIMEOUT.get()
        seconds = default if timeout is None else self._submitter.checked_timeout(timeout)
        limit = self.vote_limit()
        if not isinstance(op, str) or op not in _OPS:
            call.refuse(f"op={op!r}: expected one of {', '.join(_OPS)}")
        op = AgreementOp(op)
        vote = _vote(call, value, op)
        if len(vote) > limit:
            call.refuse(f"a vote of {len(vote)} bytes: there is room for {limit} in a group of {call.size}")
        return self.vote(op, vote, seconds)

    def vote(self, op: AgreementOp, vote: bytes, timeout: float) -> Future[Agreement[Any]]:
        """Vote in the next agreement.

        With ``op`` REBUILD the future raises AgreementOpMismatch if other ranks called another operation.
        """
        submitter = self._submitter
        with submitter.lock:
            submitter.check_not_closed()
            submitter.channel.reported = True  # the agreement reports the lost ranks
            pending = submitter.channel.agree(op, vote, timeout)
        waiter = _AgreementWaiter(pending, submitter.spec, op, timeout, self._store, self._report_evictions)
        return run_in_callback_thread(waiter.run)

    def agree_to_grow(self, can: bool) -> Future[Agreement[int]]:
        """Agree whether the group grows: the value is 1 if ``can`` is true on all surviving ranks.

        It waits for all of them, as a collective does.  Errors in the future are those of :meth:`agree`.
        """
        return self.vote(AgreementOp.GROW, _INTEGER.pack(can), self._submitter.timeout)

    def vote_limit(self) -> int:
        """Return the maximum size of a vote in bytes; raises if the group cannot vote."""
        self._submitter.check_not_closed()
        return self._submitter.ask(lambda channel: channel.vote_limit())


def _vote(call: OperationCall, value: Any, op: AgreementOp) -> bytes:
    if op is AgreementOp.GATHER:
        if not isinstance(value, bytes):
            call.refuse(f"op='gather' takes bytes, got {type(value).__name__}")
        return value
    if op is not AgreementOp.COMMON:
        return _INTEGER.pack(_integer(call, value, f"op={op.value!r} takes"))
    if isinstance(value, (bytes, str)) or not isinstance(value, Iterable):
        call.refuse(f"op='common' takes integers, got {type(value).__name__}")
    integers = {_integer(call, each, "op='common' takes several, each") for each in value}
    ordered = sorted(integers, key=lambda each: each % 2**64)  # as unsigned integers, like the core
    return b"".join(map(_INTEGER.pack, ordered))


def _call(op: AgreementOp) -> str:
    """Return the call of a rank as source code, for messages."""
    names = {AgreementOp.REBUILD: "rebuild()", AgreementOp.GROW: "agree() to admit processes"}
    return names.get(op) or f"agree(op={op.value!r})"


def _integer(call: OperationCall, value: Any, what: str) -> int:
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        call.refuse(f"{what} an integer of 64 bits, got {value!r}")
    return value


def _value(op: AgreementOp, value: bytes) -> Any:
    if op in (AgreementOp.GATHER, AgreementOp.REBUILD):
        return tuple(_parts(value))
    integers = tuple(each for (each,) in _INTEGER.iter_unpack(value))
    return tuple(sorted(integers)) if op is AgreementOp.COMMON else integers[0]


def _parts(value: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(value):
        (length,) = _LENGTH.unpack_from(value, at)
        at += _LENGTH.size + length
        yield value[at - length : at]


@dataclass(slots=True)
class _AgreementWaiter:
    """The wait for an agreement in which this rank has voted."""

    pending: PendingAgreement
    spec: GroupSpec
    op: AgreementOp
    timeout: float
    store: Store
    report_evictions: Callable[[Sequence[int], Collection[int]], None]

    def run(self) -> Agreement[Any]:
        with contextlib.closing(_WitnessClient(self.pending, self.store)) as witness:
            while True:
                news = self.pending.wait(_POLL_INTERVAL_S)
                if news.request is not None:
                    witness.ask(news.request)
                if news.outcome is not AgreementOutcome.OPEN:
                    return self._result(news, witness.failure)

    def _result(self, news: AgreementState, failure: Exception | None) -> Agreement[Any]:
        call = "rebuild" if self.op is AgreementOp.REBUILD else "agree"
        where = f"{call} on rank {self.spec.rank} of group {self.spec.name!r}"
        if news.outcome is AgreementOutcome.CLOSED:
            raise GroupClosed(f"{where}: the group was closed before there was a decision")
        if news.outcome is AgreementOutcome.NO_QUORUM:
            raise self._undecided(where, failure) from failure
        if news.outcome is AgreementOutcome.LEFT_OUT and not news.ranks:
            raise Evicted(
                f"{where}: this process was stopped for too long; the other ranks on its host evicted it and "
                "go on without it"
            )
        if news.outcome is AgreementOutcome.LEFT_OUT:
            raise Evicted(
                f"{where}: {ranks_named(news.ranks)} decided to go on without this rank, because they had "
                "lost it or it had not voted in time",
                news.ranks,
            )
        assert news.op is not None
        if news.op is AgreementOp.DIFFERS:
            raise self._differs(where, news)
        lost = tuple(rank for rank in range(len(self.spec.ranks)) if rank not in news.ranks)
        self.report_evictions(lost, self.pending.losses()[1])
        return Agreement(_value(news.op, news.value), news.ranks, lost)

    def _differs(self, where: str, news: AgreementState) -> GroupError:
        called = dict(zip(news.ranks, news.called, strict=True))
        called.setdefault(self.spec.rank, self.op)
        ranks = {op: [rank for rank, other in called.items() if other is op] for op in called.values()}
        told = "; ".join(f"{ranks_named(those)} called {_call(op)}" for op, those in ranks.items())
        calls = f"{where}: {told}"
        if self.op is AgreementOp.REBUILD:
            return AgreementOpMismatch(calls)
        if AgreementOp.REBUILD not in ranks:
            return CollectiveMismatch(calls)
        lost, _ = self.pending.losses()
        known = f"{ranks_named(lost)} {'is' if len(lost) == 1 else 'are'} lost: " if lost else ""
        return RebuildCalled(f"{calls}.  {known}call rebuild on this rank too", lost)

    def _undecided(self, where: str, failure: Exception | None) -> GroupError:
        lost, dead = self.pending.losses()
        size = len(self.spec.ranks)
        reached = size - len(lost)
        within = f"{where}: no decision within {format_seconds(self.timeout)}"
        if len(lost) == len(dead) or 2 * reached > size:
            return OperationTimeout(f"{within}: a rank that can be reached has not voted or has not answered")
        apart = [rank for rank in lost if rank not in dead]
        return QuorumLost(
            f"{within}: {ranks_named(apart)} cannot be reached and may be running, and this side has "
            f"{'exactly' if 2 * reached == size else 'less than'} half of the {size} ranks"
            + (f"; the store could not be asked: {describe_error(failure)}" if failure else ""),
            lost,
        )


class _WitnessClient:
    """Sends the requests of a leader to the store, each in its own thread.

    Attributes:
        failure: the last error of a request that could not be answered yet.
    """

    def __init__(self, pending: PendingAgreement, store: Store) -> None:
        self._pending_agreement = pending
        self._store = store
        self._key = f"agreement/{pending.number}"
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._latest: WitnessRequest | None = None
        self._clone: Store | None = None
        self._over = False
        self.failure: Exception | None = None

    def ask(self, request: WitnessRequest) -> None:
        """Answer the request as soon as the store does, unless a newer request replaces it."""
        self._latest = request
        run_in_callback_thread(lambda: self._answer(request))

    def close(self) -> None:
        """End all requests: the agreement has completed."""
        with self._lock:
            self._over = True
            clone = self._clone
        if clone is not None:
            clone.close()

    def _answer(self, request: WitnessRequest) -> None:
        while not self._over and self._latest is request:
            try:
                self._pending_agreement.tell_witness(request, self._ask(self._connected(), request))
                self.failure = None
                return
            except Exception as error:  # the store may become reachable, and its key may be damaged
                if not self._over:
                    self.failure = error
                time.sleep(_WITNESS_RETRY_DELAY_S)

    def _connected(self) -> Store:
        """Return a separate connection to the store; closing it ends its calls."""
        with self._connecting:
            if self._clone is None:
                clone = self._store.clone(_WITNESS_TIMEOUT_S)
                with self._lock:  # not held while connecting, as close() takes it
                    self._clone = clone
            if self._over:
                self._clone.close()
            return self._clone

    def _ask(self, store: Store, request: WitnessRequest) -> bytes:
        """Ask the witness; returns the value that it had before."""
        kept = b""
        while True:
            wanted = self._pending_agreement.ask_witness(request, kept)
            if wanted is None:
                return kept
            found = store.compare_set(self._key, kept, wanted)
            if found == wanted:
                return kept
            kept = found
