"""A store in etcd v3, which survives the loss of processes, hosts and a minority of its servers.

All keys of a job are under ``/shoal/<job>/``::

    life         id of the lease to which all keys belong
    op/<channel> number of the last executed write of one write channel of a client
    k/<key>      the keys of the store

*Each write is one transaction*, executed once however often it is sent. A client sends its writes on *write
channels*, one at a time, and numbers them. The transaction stores the number together with the change, on
condition that the channel's key is unchanged. If an answer is lost, the client stores another value in that
key, on the same condition: either the attempt shows that the write was executed, or the write will fail its
condition whenever it arrives. The result of a write is not stored: the transaction also requires that the
keys are unchanged since the result was computed from them. Only counters may have been incremented by others
meanwhile (``job.py``): etcd reports how often.

*A blocking read* reads at revision r and then watches from r + 1; when the watch ends, it reads again.

*The lease* is kept alive by every process that has the store open, and expires a minute after the last one,
with all keys. Each transaction requires that ``life`` is as it was when the store was opened: a process that
was suspended while the lease expired gets an error.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from ... import config
from ...common.formatting import counted
from ...errors import AuthenticationError, StoreError, StoreTimeout
from ...net import Deadline
from ..base import Store
from ..external import job as external_job
from ..external.job import ExternalBacking, parts
from ..requests import Add, Call, KeyTable, StoreRequest, TogetherResult, one_by_one
from .gateway import Body, DatabaseFull, Gateway, LeaseExpired, OutcomeUnknown, StreamEnded
from .job import (
    EtcdJob,
    EtcdWriteChannel,
    KeyValue,
    Range,
    TransactionReply,
    at,
    created_at,
    modified_at,
    prefix_range,
    put,
    stored,
    stored_counter,
    value_is,
    value_of,
)  # fmt: skip

R = TypeVar("R")
T = TypeVar("T")

#: longest value in bytes: etcd takes requests of 1.5 MiB
MAX_ETCD_VALUE = 2**20
#: maximum bytes of keys and values that are set in one step
MAX_ETCD_BATCH = MAX_ETCD_VALUE
#: longest key in bytes: a write names it four times
MAX_ETCD_KEY = 16 * 2**10
#: maximum number of operations in a transaction of etcd, less the store's own one
_MAX_OPERATIONS = 128 - 1
#: maximum bytes of keys in one request
_MAX_KEY_BYTES_PER_REQUEST = 2**20
#: maximum number of values that are read in one message, each of up to 1 MB
_MAX_VALUES_PER_REQUEST = 64


class _Events(msgspec.Struct):
    created: bool = False
    canceled: bool = False
    events: list[msgspec.Raw] = []


class _Watched(msgspec.Struct):
    result: _Events = msgspec.field(default_factory=lambda: _Events(canceled=True))  # default: an error


class EtcdStore(Store):
    """The keys of one job in etcd.

    Args:
        servers: ``host:port`` of each server of one etcd cluster; tried in turn.
        job: name of the job; the stores of one job share their keys.
        tls: TLS context for the servers; None: no encryption.
        user, password: for an etcd with authentication.
        timeout: default deadline in seconds, also for connecting; None: ``SHOAL_TIMEOUT``.

    Raises:
        ConfigurationError: the package ``urllib3`` is missing.
        AuthenticationError: etcd refuses the user, or one side refuses the other's certificate.
        StoreTimeout: no server answered in time.
    """

    _backing: _EtcdBacking

    def __init__(
        self,
        servers: Sequence[str],
        job: str = "default",
        *,
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout: float | None = None,
    ) -> None:
        timeout = config.TIMEOUT.get() if timeout is None else timeout
        job_keys = EtcdJob(Gateway(servers, tls, user, password), job, Deadline(timeout))
        super().__init__(_EtcdBacking(job_keys), timeout)

    @property
    def prefix(self) -> str:
        """The start of all keys of the job in etcd."""
        return self._backing.job.prefix.decode()


class _TooMuch(Exception):
    """The values are too long to be written in one step."""


class Changes(NamedTuple):
    """The operations of one write; ``counters``: those to put again unchanged, with their present content."""

    operations: list[Body]
    counters: Mapping[str, bytes] = {}


class Done(NamedTuple):
    """An executed write: the revision that it created, its counters as of then or later, and its answer."""

    revision: int
    counters: list[KeyValue]
    answer: TransactionReply | None = None


class _EtcdBacking(ExternalBacking[EtcdJob]):
    longest_key = MAX_ETCD_KEY
    longest_value = MAX_ETCD_VALUE

    def __init__(self, job: EtcdJob) -> None:
        super().__init__(job)
        self._last_read = threading.local()  # its revision

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        try:
            return super().execute(request, deadline)
        except LeaseExpired as error:
            raise self.job.expired_error() from error

    # -- reading -------------------------------------------------------------------------------

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        found = self._read([at(self._name(key)) for key in keys[:_MAX_VALUES_PER_REQUEST]])
        return [value_of(each.only) for each in found]

    def missing(self, keys: Sequence[str]) -> list[str]:
        missing: list[str] = []
        first = 0
        for part in parts(keys, _MAX_OPERATIONS, _MAX_KEY_BYTES_PER_REQUEST):
            found = self._read([{**at(self._name(key)), "count_only": True} for key in part])
            missing += [key for key, each in zip(part, found, strict=True) if not each.count]
            first = first or self._last_read.revision
        self._last_read.revision = first  # a watch must not miss changes between two parts
        return missing

    def list_keys(self, prefix: str) -> list[str]:
        (found,) = self._read([{**prefix_range(self._name(prefix)), "keys_only": True}])
        cut = len(self._name(""))
        return [each.key[cut:].decode() for each in found.kvs]

    def count(self, prefix: str) -> int:
        (found,) = self._read([{**prefix_range(self._name(prefix)), "count_only": True}])
        return found.count

    def watch(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Return when the last of ``keys`` is set, which likely happens last, or when the lease expires."""
        start = self._last_read.revision + 1
        silence = min(deadline.remaining(), external_job.WATCH_TIMEOUT_S)
        watched = [
            {"key": self._name(keys[-1]), "start_revision": start, "filters": ["NODELETE"]},
            {"key": self.job.life, "start_revision": start, "filters": ["NOPUT"]},
        ]
        try:
            stream = self.job.client.stream("watch", [{"create_request": each} for each in watched], silence)
        except StreamEnded:
            self._paused(deadline)
            return
        with stream, self._watching(stream) as open_still:
            if not open_still:
                return
            try:
                for each in stream.documents(_Watched):
                    if each.result.events:
                        return
                    if each.result.canceled:  # compacted or not permitted: the next read raises the error
                        break
            except TimeoutError:
                return
            except StreamEnded:
                pass
        self._paused(deadline)

    # -- writing -------------------------------------------------------------------------------

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        values = dict(items)
        length = sum(len(key.encode()) + len(value) for key, value in values.items())
        if len(values) > _MAX_OPERATIONS or (len(values) > 1 and length > MAX_ETCD_BATCH):
            raise StoreError(
                f"cannot set {counted(len(values), 'key')} and {length} bytes at once: etcd accepts at most "
                f"{_MAX_OPERATIONS} keys and {MAX_ETCD_BATCH} bytes in one step; set them in several calls"
            )
        if values:
            puts = [put(self._name(key), stored(value), self.job.lease) for key, value in values.items()]
            self._write(lambda _: Changes(puts))

    def add(self, key: str, amount: int) -> int:
        return self._step([key], lambda table: table.add(key, amount), {key: amount})

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        return self._step([key], lambda table: table.swap(key, held, value))

    def together(self, calls: Sequence[Call]) -> TogetherResult:
        times = Counter(call.key for call in calls)
        adds = {call.key: call.amount for call in calls if isinstance(call, Add) and times[call.key] == 1}
        try:
            return self._step(list(times), lambda table: one_by_one(table, calls), adds)
        except _TooMuch:  # long values were appended to
            return one_by_one(self, calls)

    def delete_prefix(self, prefix: str) -> int:
        name = self._name(prefix)
        if not self.count(prefix):
            return 0
        done = self._write(lambda _: Changes([{"request_delete_range": prefix_range(name)}]))
        assert done is not None
        if done.answer is not None:
            return done.answer.responses[0].response_delete_range.deleted
        return self._look_back([{**prefix_range(name), "count_only": True}], done.revision - 1)[0].count

    def _change(
        self, key: str, change: Callable[[bytes | None], bytes | None]
    ) -> tuple[bytes | None, bytes | None]:
        return self._step([key], lambda table: table._change(key, change))

    def _step(self, keys: Sequence[str], work: Callable[[KeyTable], R], adds: Mapping[str, int] = {}) -> R:
        """Call ``work`` on the values of ``keys``, and write its changes in one step.

        Args:
            work: may be called several times; the result of the last call is returned.
            adds: the keys to which ``work`` only adds an amount.

        Raises:
            _TooMuch: the changed values are several and too long for one step.
        """
        before: dict[str, bytes] = {}
        changes = Changes([])
        results: list[R] = []

        def done() -> KeyTable:
            table = KeyTable()
            table.longest_value = self.longest_value
            table.values.update(before)
            results.append(work(table))
            return table

        def changes_of(found: Sequence[KeyValue]) -> Changes:
            nonlocal before, changes
            pairs = list(zip(keys, found, strict=True))
            before = {key: value for key, each in pairs if (value := value_of(each)) is not None}
            after = done().values
            changed = [(key, each) for key, each in pairs if after.get(key) != before.get(key)]
            if len(changed) > 1 and sum(len(after.get(key, b"")) for key, _ in changed) > MAX_ETCD_BATCH:
                raise _TooMuch
            operations: list[Body] = []
            counters: dict[str, bytes] = {}
            for key, each in changed:
                if key not in after:
                    operations.append({"request_delete_range": {"key": self._name(key)}})
                    continue
                value = stored_counter(each, after[key], adds[key]) if key in adds else None
                if value is not None and value == each.value:
                    counters[key] = value
                operations.append(put(self._name(key), value or stored(after[key]), self.job.lease))
            changes = Changes(operations, counters)
            return changes

        done_at = self._write(changes_of, keys)
        if done_at is not None and changes.counters:
            for key, total in zip(changes.counters, self._totals(changes.counters, done_at), strict=True):
                before[key] = b"%d" % (total - adds[key])
            done()
        return results[-1]

    def _totals(self, counters: Mapping[str, bytes], done: Done) -> list[int]:
        """Return the totals of the counters after a write that incremented them."""
        last = done.counters
        if any(each.mod_revision != done.revision for each in last):  # others have incremented them since
            reads = [at(self._name(key)) for key in counters]
            last = [each.only for each in self._look_back(reads, done.revision)]
        totals: list[int] = []
        for (key, held), each in zip(counters.items(), last, strict=True):
            if each.value != held or not (total := value_of(each)):
                raise StoreError(f"{self.job}: the server returned a value that counter {key!r} never had")
            totals.append(int(total))
        return totals

    def _look_back(self, ranges: Sequence[Body], revision: int) -> list[Range]:
        """Read the ranges at an earlier revision, to compute the result of an executed write."""
        try:
            return self._read([{**each, "revision": revision} for each in ranges])
        except (StoreError, AuthenticationError) as error:
            known = StoreTimeout if isinstance(error, StoreTimeout) else StoreError
            raise known(f"the change was done, but its result is not known: {error}") from error

    # -- transactions ---------------------------------------------------------------------------

    def _read(self, ranges: list[Body]) -> list[Range]:
        """Read the keys of each range, all at one revision."""
        answer = self._ask({"success": self._read_operations(ranges)})
        self._last_read.revision = answer.header.revision
        return self._checked(answer)

    def _read_operations(self, ranges: list[Body]) -> list[Body]:
        return [{"request_range": each} for each in [{**at(self.job.life), "keys_only": True}, *ranges]]

    def _checked(self, answer: TransactionReply) -> list[Range]:
        """Return the ranges requested by :meth:`_read_operations`. StoreError if the job's life has ended."""
        life, *found = (each.response_range for each in answer.responses)
        if not life.kvs or life.kvs[0].create_revision != self.job.birth_revision:
            raise self.job.expired_error()
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
        with self.job.channel() as channel:
            reads = self._read_operations([at(each) for each in (channel.key, *map(self._name, keys))])
            found: list[KeyValue] = []
            refusals = 0
            if keys:
                found = self._update_channel(channel, self._ask({"success": reads}))
            while True:
                operations, counters = changes_of(found)
                if not operations:
                    return None
                conditions = self._conditions(channel)
                conditions += [
                    value_is(self._name(key), counters[key])
                    if key in counters
                    else modified_at(self._name(key), each.mod_revision)
                    for key, each in zip(keys, found, strict=True)
                ]
                ranges = [{"request_range": at(self._name(key))} for key in counters]
                number = put(channel.key, b"%d" % channel.number, self.job.lease)
                transaction = {
                    "compare": conditions, "success": [*operations, number, *ranges], "failure": reads,
                }  # fmt: skip
                try:
                    answer = self._ask(transaction, writes=True)
                except (OutcomeUnknown, DatabaseFull) as unclear:
                    answer, done = self._resolve_outcome(channel, reads, unclear)
                    found = self._update_channel(channel, answer)
                    if done:
                        last = [each for key, each in zip(keys, found, strict=True) if key in counters]
                        return Done(channel.revision, last)
                    if self._calls.deadline.expired:
                        raise StoreTimeout(f"{self.job}: {unclear}; it was not done") from None
                    if self._paused(self._calls.deadline):
                        raise StoreError("closed") from None  # Store replaces the message
                    continue
                if answer.succeeded:
                    channel.revision = answer.header.revision
                    last = [each.response_range.only for each in answer.responses[len(operations) + 1 :]]
                    return Done(channel.revision, last, answer)
                before, found = found, self._update_channel(channel, answer)
                refusals += 1
                self.swap_failed(_conflicting_key(keys, counters, before, found), refusals)

    def _conditions(self, channel: EtcdWriteChannel) -> list[Body]:
        """Return the conditions of every write: the job's life goes on, and the channel is unchanged."""
        life = created_at(self.job.life, self.job.birth_revision)
        return [life, modified_at(channel.key, channel.revision)]

    def _resolve_outcome(
        self, channel: EtcdWriteChannel, reads: list[Body], unclear: OutcomeUnknown | DatabaseFull
    ) -> tuple[TransactionReply, bool]:
        """Find out whether a write without an answer was executed; if not, make sure that it never will be.

        Returns:
            The present result of ``reads``, and whether the write was executed.
        """
        number, fence = b"%d" % channel.number, b"-%d" % channel.number
        refused: Exception = unclear
        if isinstance(unclear, OutcomeUnknown):
            transaction = {
                "compare": self._conditions(channel),
                "success": [put(channel.key, fence, self.job.lease), *reads],
                "failure": reads,
            }
            try:
                answer = self._ask(transaction)  # may be executed twice
            except LeaseExpired:
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
        held = None if isinstance(refused, StoreTimeout) else self._channel_value(channel)
        if held in (number, fence):
            return self._ask({"success": reads}), held == number
        if held is not None and isinstance(unclear, DatabaseFull):
            raise unclear
        raise StoreTimeout(f"{refused}; it is unknown whether the request was or will be done") from unclear

    def _channel_value(self, channel: EtcdWriteChannel) -> bytes | None:
        """Return the value of the channel's key; None on an error. A full etcd 3.5.0 refuses transactions."""
        with contextlib.suppress(StoreError, AuthenticationError):
            return self._call("kv/range", at(channel.key), Range).only.value
        return None

    def _update_channel(self, channel: EtcdWriteChannel, answer: TransactionReply) -> list[KeyValue]:
        """Return the keys that were read; update the channel's revision."""
        last, *found = [each.only for each in self._checked(answer)]
        channel.revision = last.mod_revision
        return found

    def _name(self, key: str) -> bytes:
        return self.job.prefix + b"k/" + key.encode()

    def _ask(self, transaction: Body, *, writes: bool = False) -> TransactionReply:
        return self._call("kv/txn", transaction, TransactionReply, writes=writes)

    def _call(self, path: str, body: Body, answer: type[T], *, writes: bool = False) -> T:
        return self.job.client.call(path, body, answer, self._calls.deadline, self.closed, writes=writes)


def _conflicting_key(
    keys: Sequence[str], counters: Container[str], before: Sequence[KeyValue], found: Sequence[KeyValue]
) -> str:
    """Return a key that others have changed, because of which a write was refused."""
    changed = (
        key
        for key, was, now in zip(keys, before, found, strict=True)
        if was.value != now.value or (key not in counters and was.mod_revision != now.mod_revision)
    )
    return next(changed, "")
