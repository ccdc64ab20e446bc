"""The state that the stores of one job in etcd share in a process, and the parts of etcd's transactions."""

from __future__ import annotations

import contextlib
import random
from urllib.parse import quote

import msgspec

from ...errors import AuthenticationError, StoreError, StoreTimeout
from ...net import Deadline
from ..external import job as outside_job
from ..external.job import OutsideJob, WriteChannel
from .gateway import Body, Full, Gateway, LeaseGone, Unclear

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


class EtcdLine(WriteChannel):
    """A write channel, and the revision of the key that holds its number (0: it does not exist yet)."""

    __slots__ = ("revision",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.revision = 0

    @property
    def key(self) -> bytes:
        return self.name.encode()


class EtcdJob(OutsideJob[EtcdLine]):
    """The connections, write channels and lease that clones in this process share."""

    def __init__(self, gateway: Gateway, name: str, deadline: Deadline) -> None:
        super().__init__(name, str(gateway))
        self.gateway = gateway
        self.prefix = f"/shoal/{quote(name, safe='')}/".encode()
        self.life = self.prefix + b"life"
        self.lease, self.born = self._join(deadline)
        self.host = gateway.server.rpartition(":")[0].strip("[]")

    def disconnect(self) -> None:
        self.gateway.close()

    def _new_line(self, ident: str) -> EtcdLine:
        return EtcdLine(f"{self.prefix.decode()}op/{ident}")

    def _lives(self, deadline: Deadline) -> bool:
        look = {"success": [{"request_range": at(self.life)}]}
        answer = self.gateway.call("kv/txn", look, TransactionReply, deadline, self._ended)
        found = answer.responses[0].response_range.kvs
        return bool(found) and found[0].create_revision == self.born

    def _anew(self, deadline: Deadline) -> EtcdJob:
        gateway = self.gateway.clone()
        try:
            return EtcdJob(gateway, self.name, deadline)
        except BaseException:
            gateway.close()
            raise

    def _keep_alive(self, deadline: Deadline) -> bool:
        return self._keep_once(self.lease, deadline)

    def _join(self, deadline: Deadline) -> tuple[int, int]:
        """Return the job's lease and the revision of ``life``; begin a life of the job if there is none."""
        call, mine = self.gateway.call, 0
        full: Full | None = None
        while True:
            look = {"success": [{"request_range": {"key": self.life}}]}
            found = (
                call("kv/txn", look, TransactionReply, deadline, self._ended).responses[0].response_range.kvs
            )
            if found:
                lease = int(found[0].value)
                # The keys of an expired lease may still exist for a moment.
                if lease == mine or self._keep_once(lease, deadline):
                    if mine and lease != mine:
                        self._revoke(mine, deadline)
                    return lease, found[0].create_revision
                self._ended.wait(random.uniform(_MIN_RETRY_DELAY_S, _MAX_RETRY_DELAY_S))
            elif full is not None:
                raise full
            else:
                wanted = {"TTL": int(outside_job.KEY_TTL_S)}
                mine = mine or call("lease/grant", wanted, _Lease, deadline, self._ended).ID
                begin = {
                    "compare": [created(self.life, 0)],
                    "success": [put(self.life, b"%d" % mine, mine)],
                }
                try:
                    call("kv/txn", begin, TransactionReply, deadline, self._ended, writes=True)
                except (Unclear, LeaseGone):  # the next iteration finds out
                    pass
                except Full as error:  # it may have been executed nevertheless
                    full = error
            if deadline.expired:
                raise StoreTimeout(f"{self}: an earlier job of this name is still ending")

    def _revoke(self, lease: int, deadline: Deadline) -> None:
        with contextlib.suppress(StoreError, AuthenticationError):
            self.gateway.call("lease/revoke", {"ID": lease}, _Lease, deadline, self._ended)

    def _keep_once(self, lease: int, deadline: Deadline) -> bool:
        """Renew the lease for its full time; return whether it still exists."""
        kept = self.gateway.call("lease/keepalive", {"ID": lease}, _Kept, deadline, self._ended)
        return kept.result.TTL > 0


def at(key: bytes) -> dict[str, object]:
    return {"key": key}


def under(start: bytes) -> dict[str, object]:
    """Return the range of all keys that begin with ``start`` (UTF-8, so its last byte is below 255)."""
    return {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])}


def put(key: bytes, value: bytes, lease: int) -> Body:
    return {"request_put": {"key": key, "value": value, "lease": lease}}


def created(key: bytes, revision: int) -> Body:
    return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": revision}


def modified(key: bytes, revision: int) -> Body:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def holds(key: bytes, value: bytes) -> Body:
    return {"key": key, "target": "VALUE", "result": "EQUAL", "value": value}
