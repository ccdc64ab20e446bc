"""A store in etcd v3, which survives the loss of processes, hosts and a minority of its servers.

All keys of a job are under ``/shoal/<job>/``::

    life         id of the lease to which all keys belong
    op/<line>    number of the last executed write of one write channel of a client
    k/<key>      the keys of the store

*Each write is one transaction*, executed once however often it is sent. A client sends its writes on *write
channels*, one at a time, and numbers them. The transaction stores the number together with the change, on
condition that the channel's key is unchanged. If an answer is lost, the client stores another value in that
key, on the same condition: either the attempt shows that the write was executed, or the write will fail its
condition whenever it arrives. The result of a write is not stored: the transaction also requires that the
keys are unchanged since the result was computed from them. Only counters may have been incremented by others
meanwhile (``values.py``): etcd reports how often.

*A blocking read* reads at revision r and then watches from r + 1; when the watch ends, it reads again.

*The lease* is kept alive by every process that has the store open, and expires a minute after the last one,
with all keys. Each transaction requires that ``life`` is as it was when the store was opened: a process that
was suspended while the lease expired gets an error.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import SplitResult

import msgspec

from ... import config
from ...common.wording import counted
from ...errors import AuthenticationError, StoreError, StoreTimeout
from ...net import Deadline
from ..base import Store
from ..external import client as outside_client
from ..external.client import parts
from ..external.tls import tls_context
from ..external.url import parse_outside
from ..operations import C, KeyTable, Operations, R
from ..requests import Add, StoreRequest
from .gateway import Body, Gateway, LeaseGone, StreamEnded
from .job import EtcdJob, KeyValue, Range, at, put, under
from .transactions import Changes, Done, Transactions
from .values import stored, stored_counter, value_of

T = TypeVar("T")

#: default port of etcd
_PORT = 2379
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

    _backing: _EtcdClient

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
        gateway = Gateway(servers, tls, user, password)
        try:
            job_keys = EtcdJob(gateway, job, Deadline(timeout))
        except BaseException:
            gateway.close()
            raise
        super().__init__(_EtcdClient(job_keys), timeout)

    @property
    def prefix(self) -> str:
        """The start of all keys of the job in etcd."""
        return self._backing.job.prefix.decode()


def open_etcd(url: SplitResult, *, job: str, timeout: float | None) -> EtcdStore:
    """Open the store of ``job`` that a URL with scheme ``etcd`` or ``etcds`` names.

    Raises:
        UsageError, ConfigurationError: the URL is malformed, or a file that it names cannot be used.
    """
    encrypted = url.scheme == "etcds"
    named = parse_outside(url, _PORT, tls=encrypted)
    return EtcdStore(
        named.servers,
        job,
        tls=tls_context(named.ca, named.cert, named.key) if encrypted else None,
        user=named.user,
        password=named.password,
        timeout=timeout,
    )


class _TooMuch(Exception):
    """The values are too long to be written in one step."""


class _EtcdClient(Transactions):
    longest_key = MAX_ETCD_KEY
    longest_value = MAX_ETCD_VALUE

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        try:
            return super().execute(request, deadline)
        except LeaseGone as error:
            raise self.job.gone() from error

    # -- reading -------------------------------------------------------------------------------

    def get_now(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        found = self._read([at(self._name(key)) for key in keys[:_MAX_VALUES_PER_REQUEST]])
        return [value_of(each.only) for each in found]

    def missing(self, keys: Sequence[str]) -> list[str]:
        missing: list[str] = []
        first = 0
        for part in parts(keys, _MAX_OPERATIONS, _MAX_KEY_BYTES_PER_REQUEST):
            found = self._read([{**at(self._name(key)), "count_only": True} for key in part])
            missing += [key for key, each in zip(part, found, strict=True) if not each.count]
            first = first or self._seen.revision
        self._seen.revision = first  # a watch must not miss changes between two parts
        return missing

    def list_keys(self, prefix: str) -> list[str]:
        (found,) = self._read([{**under(self._name(prefix)), "keys_only": True}])
        cut = len(self._name(""))
        return [each.key[cut:].decode() for each in found.kvs]

    def count(self, prefix: str) -> int:
        (found,) = self._read([{**under(self._name(prefix)), "count_only": True}])
        return found.count

    def watch(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Return when the last of ``keys`` is set, which likely happens last, or when the lease expires."""
        start = self._seen.revision + 1
        silence = min(deadline.remaining(), outside_client.SILENCE)
        watched = [
            {"key": self._name(keys[-1]), "start_revision": start, "filters": ["NODELETE"]},
            {"key": self.job.life, "start_revision": start, "filters": ["NOPUT"]},
        ]
        try:
            stream = self.job.gateway.stream("watch", [{"create_request": each} for each in watched], silence)
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

    def set(self, key: str, value: bytes) -> None:
        self.set_many([(key, value)])

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

    def together(self, calls: Sequence[C], one_by_one: Callable[[Operations, Sequence[C]], R]) -> R:
        times = Counter(call.key for call in calls)  # type: ignore[attr-defined]
        adds = {call.key: call.amount for call in calls if isinstance(call, Add) and times[call.key] == 1}
        try:
            return self._step(list(times), lambda table: one_by_one(table, calls), adds)
        except _TooMuch:  # long values were appended to
            return one_by_one(self, calls)

    def delete_prefix(self, prefix: str) -> int:
        name = self._name(prefix)
        if not self.count(prefix):
            return 0
        done = self._write(lambda _: Changes([{"request_delete_range": under(name)}]))
        assert done is not None
        if done.answer is not None:
            return done.answer.responses[0].response_delete_range.deleted
        return self._look_back([{**under(name), "count_only": True}], done.revision - 1)[0].count

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
            looks = [at(self._name(key)) for key in counters]
            last = [each.only for each in self._look_back(looks, done.revision)]
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
