"""The state that the stores of one job in etcd share in a process; requests and values as etcd holds them."""

from __future__ import annotations

import contextlib
import random
import re
from urllib.parse import quote

import msgspec

from ...errors import AuthenticationError, StoreError, StoreTimeout
from ...net import Deadline
from ..external import job as external_job
from ..external.job import ExternalJob, WriteChannel
from .gateway import Body, DatabaseFull, Gateway, LeaseExpired, OutcomeUnknown

#: limits in seconds of the pause between two checks whether an earlier life of the job has ended
_MIN_RETRY_DELAY_S, _MAX_RETRY_DELAY_S = 0.001, 0.1


class KeyValue(msgspec.Struct):
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    key: bytes = b""


class Header(msgspec.Struct):
    revision: int = 0


class Range(msgspec.Struct):
    kvs: list[KeyValue] = []
    count: int = 0

    @property
    def only(self) -> KeyValue:
        """The only requested key; with version and revision 0 if it does not exist."""
        return self.kvs[0] if self.kvs else KeyValue()


class Deleted(msgspec.Struct):
    deleted: int = 0


class Response(msgspec.Struct):
    response_range: Range = msgspec.field(default_factory=Range)
    response_delete_range: Deleted = msgspec.field(default_factory=Deleted)


class TransactionReply(msgspec.Struct):
    """The answer to a transaction."""

    header: Header
    succeeded: bool = False
    responses: list[Response] = []


class _Lease(msgspec.Struct):
    ID: int = 0
    TTL: int = 0
    error: str = ""


class _Kept(msgspec.Struct):
    result: _Lease = msgspec.field(default_factory=_Lease)


class EtcdWriteChannel(WriteChannel):
    """A write channel, and the revision of the key that holds its number (0: it does not exist yet)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.key = name.encode()
        self.revision = 0


class EtcdJob(ExternalJob[Gateway, EtcdWriteChannel]):
    """The connections, write channels and lease that clones in this process share."""

    def _join(self, deadline: Deadline) -> None:
        self.prefix = f"/shoal/{quote(self.name, safe='')}/".encode()
        self.life = self.prefix + b"life"
        self.lease, self.birth_revision = self._find_lease(deadline)
        self.host = self.client.server.rpartition(":")[0].strip("[]")

    def _new_channel(self, ident: str) -> EtcdWriteChannel:
        return EtcdWriteChannel(f"{self.prefix.decode()}op/{ident}")

    def _exists(self, deadline: Deadline) -> bool:
        found = self._read_life(deadline)
        return bool(found) and found[0].create_revision == self.birth_revision

    def _read_life(self, deadline: Deadline) -> list[KeyValue]:
        read = {"success": [{"request_range": at(self.life)}]}
        answer = self.client.call("kv/txn", read, TransactionReply, deadline, self._closing)
        return answer.responses[0].response_range.kvs

    def _keep_alive(self, deadline: Deadline) -> bool:
        return self._keep_once(self.lease, deadline)

    def _find_lease(self, deadline: Deadline) -> tuple[int, int]:
        """Return the job's lease and the revision of ``life``; begin a life of the job if there is none."""
        call, mine = self.client.call, 0
        full: DatabaseFull | None = None
        while True:
            found = self._read_life(deadline)
            if found:
                lease = int(found[0].value)
                # The keys of an expired lease may still exist for a moment.
                if lease == mine or self._keep_once(lease, deadline):
                    if mine and lease != mine:
                        self._revoke(mine, deadline)
                    return lease, found[0].create_revision
                self._closing.wait(random.uniform(_MIN_RETRY_DELAY_S, _MAX_RETRY_DELAY_S))
            elif full is not None:
                raise full
            else:
                wanted = {"TTL": int(external_job.KEY_TTL_S)}
                mine = mine or call("lease/grant", wanted, _Lease, deadline, self._closing).ID
                birth = put(self.life, b"%d" % mine, mine)
                begin = {"compare": [created_at(self.life, 0)], "success": [birth]}
                try:
                    call("kv/txn", begin, TransactionReply, deadline, self._closing, writes=True)
                except (OutcomeUnknown, LeaseExpired):  # the next iteration finds out
                    pass
                except DatabaseFull as error:  # it may have been executed nevertheless
                    full = error
            if deadline.expired:
                raise StoreTimeout(f"{self}: an earlier job of this name is still ending")

    def _revoke(self, lease: int, deadline: Deadline) -> None:
        with contextlib.suppress(StoreError, AuthenticationError):
            self.client.call("lease/revoke", {"ID": lease}, _Lease, deadline, self._closing)

    def _keep_once(self, lease: int, deadline: Deadline) -> bool:
        """Renew the lease for its full time; return whether it still exists."""
        kept = self.client.call("lease/keepalive", {"ID": lease}, _Kept, deadline, self._closing)
        return kept.result.TTL > 0


def at(key: bytes) -> dict[str, object]:
    return {"key": key}


def prefix_range(start: bytes) -> dict[str, object]:
    """Return the range of all keys that begin with ``start`` (UTF-8, so its last byte is below 255)."""
    return {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])}


def put(key: bytes, value: bytes, lease: int) -> Body:
    return {"request_put": {"key": key, "value": value, "lease": lease}}


def created_at(key: bytes, revision: int) -> Body:
    return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": revision}


def modified_at(key: bytes, revision: int) -> Body:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def value_is(key: bytes, value: bytes) -> Body:
    return {"key": key, "target": "VALUE", "result": "EQUAL", "value": value}


# The encoding of values: unchanged, except for counters, which many clients can increment at once.
#
# etcd counts how often a key was put since its creation: its *version*. A key to which the same amount is
# added repeatedly holds that amount and a base; its value is the base plus the amount times the version. So
# each client adds by putting the present content again, which several clients can do at the same moment.

#: prefix of a value that begins with a zero byte, and prefix of the amount and base of a counter
_AS_IT_IS, _COUNTER = b"\0=", b"\0+"
_COUNTS = re.compile(rb"\0\+(-?\d{1,20}) (-?\d{1,40})")

#: the largest amounts and sums encoded as counters, so that concurrent additions stay within 64 bits
_LARGEST_AMOUNT, _LARGEST_SUM = 2**31, 2**62


def stored(value: bytes) -> bytes:
    """Return the encoding of ``value``."""
    return _AS_IT_IS + value if value.startswith(b"\0") else value


def value_of(found: KeyValue) -> bytes | None:
    """Return the value of a key; None if it does not exist (it has no version then)."""
    if not found.version:
        return None
    if not found.value.startswith(b"\0"):
        return found.value
    if counter := _COUNTS.fullmatch(found.value):
        return b"%d" % (int(counter[2]) + int(counter[1]) * found.version)
    return found.value.removeprefix(_AS_IT_IS)


def stored_counter(found: KeyValue, total: bytes, amount: int) -> bytes | None:
    """Return the encoding of ``total``, the sum of ``found`` and ``amount``, as a counter.

    It equals the present content if the same amount was added before. None: too large for a counter.
    """
    if abs(amount) > _LARGEST_AMOUNT or abs(int(total)) > _LARGEST_SUM:
        return None
    return _COUNTER + b"%d %d" % (amount, int(total) - amount * (found.version + 1))
