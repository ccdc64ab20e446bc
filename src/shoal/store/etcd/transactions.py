"""The transactions of one store of a job in etcd: consistent reads, and writes that are executed once.

The docstring of ``store.py`` explains the protocol.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ...errors import AuthenticationError, StoreError, StoreTimeout
from ..external.client import OutsideClient
from .gateway import Body, Full, LeaseGone, Unclear
from .job import EtcdJob, EtcdLine, KeyValue, Range, TransactionReply, at, created, holds, modified, put

T = TypeVar("T")


class Changes(NamedTuple):
    """The operations of one write; ``counters``: those to put again unchanged, with their present content."""

    operations: list[Body]
    counters: Mapping[str, bytes] = {}


class Done(NamedTuple):
    """An executed write: the revision that it created, its counters as of then or later, and its answer."""

    revision: int
    counters: list[KeyValue]
    answer: TransactionReply | None = None


class _Seen(threading.local):
    """The revision of each thread's last read."""

    revision = 0


class Transactions(OutsideClient[EtcdJob]):
    """The transactions of which the operations of a store consist."""

    def __init__(self, job: EtcdJob) -> None:
        super().__init__(job)
        self._seen = _Seen()

    def _read(self, ranges: list[Body]) -> list[Range]:
        """Read the keys of each range, all at one revision."""
        answer = self._ask({"success": self._looks(ranges)})
        self._seen.revision = answer.header.revision
        return self._checked(answer)

    def _looks(self, ranges: list[Body]) -> list[Body]:
        return [{"request_range": each} for each in [{**at(self.job.life), "keys_only": True}, *ranges]]

    def _checked(self, answer: TransactionReply) -> list[Range]:
        """Return the ranges requested by :meth:`_looks`. StoreError if the job's life has ended."""
        life, *found = (each.response_range for each in answer.responses)
        if not life.kvs or life.kvs[0].create_revision != self.job.born:
            raise self.job.gone()
        return found

    def _write(
        self, changes_of: Callable[[Sequence[KeyValue]], Changes], keys: Sequence[str] = ()
    ) -> Done | None:
        """Execute once, in one step, the changes that ``changes_of`` computes from ``keys``.

        Args:
            changes_of: returns no operations if nothing is to be done. Its last call counts.

        Returns:
            The executed write; None if nothing was to be done.
        """
        with self.job.line() as line:
            looks = self._looks([at(each) for each in (line.key, *map(self._name, keys))])
            found: list[KeyValue] = []
            refusals = 0
            if keys:
                found = self._take(line, self._ask({"success": looks}))
            while True:
                operations, counters = changes_of(found)
                if not operations:
                    return None
                demands = [created(self.job.life, self.job.born), modified(line.key, line.revision)]
                demands += [
                    holds(self._name(key), counters[key])
                    if key in counters
                    else modified(self._name(key), each.mod_revision)
                    for key, each in zip(keys, found, strict=True)
                ]
                ranges = [{"request_range": at(self._name(key))} for key in counters]
                number = put(line.key, b"%d" % line.number, self.job.lease)
                transaction = {
                    "compare": demands, "success": [*operations, number, *ranges], "failure": looks,
                }  # fmt: skip
                try:
                    answer = self._ask(transaction, writes=True)
                except (Unclear, Full) as unclear:
                    answer, done = self._settle(line, looks, unclear)
                    found = self._take(line, answer)
                    if done:
                        last = [each for key, each in zip(keys, found, strict=True) if key in counters]
                        return Done(line.revision, last)
                    if self._calls.deadline.expired:
                        raise StoreTimeout(f"{self.job}: {unclear}; it was not done") from None
                    if self._paused(self._calls.deadline):
                        raise StoreError("closed") from None  # Store replaces the message
                    continue
                if answer.succeeded:
                    line.revision = answer.header.revision
                    last = [each.response_range.only for each in answer.responses[len(operations) + 1 :]]
                    return Done(line.revision, last, answer)
                before, found = found, self._take(line, answer)
                refusals += 1
                self.refused(_between(keys, counters, before, found), refusals)

    def _settle(
        self, line: EtcdLine, looks: list[Body], unclear: Unclear | Full
    ) -> tuple[TransactionReply, bool]:
        """Find out whether a write without an answer was executed; if not, make sure that it never will be.

        Returns:
            The present result of ``looks``, and whether the write was executed.
        """
        number, fence = b"%d" % line.number, b"-%d" % line.number
        refused: Exception = unclear
        if isinstance(unclear, Unclear):
            demands = [created(self.job.life, self.job.born), modified(line.key, line.revision)]
            transaction = {
                "compare": demands,
                "success": [put(line.key, fence, self.job.lease), *looks],
                "failure": looks,
            }
            try:
                answer = self._ask(transaction)  # may be executed twice
            except LeaseGone:
                raise
            except (StoreError, AuthenticationError) as error:
                refused = error
            else:
                if answer.succeeded:
                    answer.responses.pop(0)
                    return answer, False
                _, last, *_ = answer.responses
                return answer, last.response_range.only.value == number
        # A full database may have executed a write that it refused, even the fence; it still answers reads.
        held = None if isinstance(refused, StoreTimeout) else self._last_word(line)
        if held in (number, fence):
            return self._ask({"success": looks}), held == number
        if held is not None and isinstance(unclear, Full):
            raise unclear
        raise StoreTimeout(f"{refused}; it is unknown whether the request was or will be done") from unclear

    def _last_word(self, line: EtcdLine) -> bytes | None:
        """Return the value of the channel's key; None on an error. A full etcd 3.5.0 refuses transactions."""
        with contextlib.suppress(StoreError, AuthenticationError):
            return self._call("kv/range", at(line.key), Range).only.value
        return None

    def _take(self, line: EtcdLine, answer: TransactionReply) -> list[KeyValue]:
        """Return the keys that were read; update the channel's revision."""
        last, *found = [each.only for each in self._checked(answer)]
        line.revision = last.mod_revision
        return found

    def _name(self, key: str) -> bytes:
        return self.job.prefix + b"k/" + key.encode()

    def _ask(self, transaction: Body, *, writes: bool = False) -> TransactionReply:
        return self._call("kv/txn", transaction, TransactionReply, writes=writes)

    def _call(self, path: str, body: Body, answer: type[T], *, writes: bool = False) -> T:
        gateway, deadline = self.job.gateway, self._calls.deadline
        return gateway.call(path, body, answer, deadline, self.closed, writes=writes)


def _between(
    keys: Sequence[str], counters: Container[str], before: Sequence[KeyValue], found: Sequence[KeyValue]
) -> str:
    """Return a key that others have changed, because of which a write was refused."""
    changed = (
        key
        for key, was, now in zip(keys, before, found, strict=True)
        if was.value != now.value or (key not in counters and was.mod_revision != now.mod_revision)
    )
    return next(changed, "")
