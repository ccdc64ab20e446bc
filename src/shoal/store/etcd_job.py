"""What the stores of one job in etcd share in a process, and what etcd's transactions are made of."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from secrets import token_hex
from urllib.parse import quote

import msgspec

from ..errors import AuthenticationError, StoreError, StoreTimeout
from ..wire import Deadline
from ..wording import in_seconds
from .gateway import Body, Gateway, LeaseGone, Unclear

#: seconds that all keys outlive the last process that has the store open
_OUTLIVING = 60.0
#: seconds between two calls that keep the lease alive; a third of its time
_KEEPING = 20.0
#: seconds in which closing waits for a call that keeps the lease alive
_CLOSING = 2.0
#: seconds between two looks whether an earlier life of the job has ended
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


class KeyValue(msgspec.Struct):
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    key: bytes = b""


class Header(msgspec.Struct):
    revision: int = 0


class Range(msgspec.Struct):
    kvs: list[KeyValue] = []
    count: int = 0


class Deleted(msgspec.Struct):
    deleted: int = 0


class Response(msgspec.Struct):
    response_range: Range = msgspec.field(default_factory=Range)
    response_delete_range: Deleted = msgspec.field(default_factory=Deleted)


class Answer(msgspec.Struct):
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


class Line:
    """Carries one write at a time.

    Attributes:
        key: where the number of its last write is.
        number: of the write.
        revision: of the line's key; None: unknown.
    """

    __slots__ = ("key", "number", "revision")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.number = 0
        self.revision: int | None = 0


class Job:
    """What clones share in this process: connections, lines, and the lease that it keeps alive."""

    def __init__(self, gateway: Gateway, name: str, deadline: Deadline) -> None:
        self.gateway = gateway
        self.name = name
        self.prefix = f"/shoal/{quote(name, safe='')}/".encode()
        self.life = self.prefix + b"life"
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._users = 0
        self._ended = threading.Event()
        self.lease, self.born = self._join(deadline)
        self.host = gateway.server.rpartition(":")[0].strip("[]")
        self._keeper = threading.Thread(target=self._keep, name="shoal-etcd-lease", daemon=True)
        self._keeper.start()

    def __str__(self) -> str:
        return f"{self.gateway}, job {self.name!r}"

    def acquire(self) -> None:
        """One more store uses it."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """One store less uses it; the last one ends it."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._ended.set()
        self._keeper.join(_CLOSING)
        self.gateway.close()

    @contextlib.contextmanager
    def line(self) -> Iterator[Line]:
        """A line for one write, with its next number."""
        with self._lock:
            line = self._idle.pop() if self._idle else Line(self.prefix + f"op/{token_hex(12)}".encode())
        line.number += 1
        try:
            yield line
        finally:
            with self._lock:
                self._idle.append(line)

    def again(self, deadline: Deadline) -> Job:
        """The job as it lives now: this one, or if it has ended, one that began after it or begins here."""
        look = {"success": [{"request_range": at(self.life)}]}
        answer = self.gateway.call("kv/txn", look, Answer, deadline, self._ended)
        found = answer.responses[0].response_range.kvs
        if found and found[0].create_revision == self.born:
            return self
        gateway = self.gateway.clone()
        try:
            return Job(gateway, self.name, deadline)
        except BaseException:
            gateway.close()
            raise

    def gone(self) -> StoreError:
        """The error of a store whose keys have ended."""
        return StoreError(
            f"{self}: all its keys have ended, as no process of the job has kept them alive for "
            f"{in_seconds(_OUTLIVING)}: this process and the others were suspended or cut off from etcd.  "
            "Start the job again"
        )

    def _join(self, deadline: Deadline) -> tuple[int, int]:
        """The job's lease, and the revision of ``life``: of a job that lives, or of one that begins."""
        call, mine = self.gateway.call, 0
        while True:
            look = {"success": [{"request_range": {"key": self.life}}]}
            found = call("kv/txn", look, Answer, deadline, self._ended).responses[0].response_range.kvs
            if found:
                lease = int(found[0].value)
                # A lease that has ended may still have its keys for a moment.
                if lease == mine or self._keep_once(lease, deadline):
                    if mine and lease != mine:
                        self._revoke(mine, deadline)
                    return lease, found[0].create_revision
                self._ended.wait(random.uniform(_SHORTEST_PAUSE, _LONGEST_PAUSE))
            else:
                mine = mine or call("lease/grant", {"TTL": int(_OUTLIVING)}, _Lease, deadline, self._ended).ID
                begin = {
                    "compare": [created(self.life, 0)],
                    "success": [put(self.life, b"%d" % mine, mine)],
                }
                with contextlib.suppress(Unclear, LeaseGone):  # the next look will tell
                    call("kv/txn", begin, Answer, deadline, self._ended, writes=True)
            if deadline.expired:
                raise StoreTimeout(f"{self}: an earlier job of this name is still ending")

    def _revoke(self, lease: int, deadline: Deadline) -> None:
        with contextlib.suppress(StoreError, AuthenticationError):
            self.gateway.call("lease/revoke", {"ID": lease}, _Lease, deadline, self._ended)

    def _keep_once(self, lease: int, deadline: Deadline) -> bool:
        """Whether the lease lives; for its whole time from now on."""
        kept = self.gateway.call("lease/keepalive", {"ID": lease}, _Kept, deadline, self._ended)
        return kept.result.TTL > 0

    def _keep(self) -> None:
        while not self._ended.wait(_KEEPING):
            with contextlib.suppress(StoreError, AuthenticationError):  # the next try may succeed
                if not self._keep_once(self.lease, Deadline(_KEEPING)):
                    return  # whoever uses the store is told


def at(key: bytes) -> dict[str, object]:
    return {"key": key}


def under(start: bytes) -> dict[str, object]:
    """All keys that begin with ``start``, which is text."""
    return {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])}


def put(key: bytes, value: bytes, lease: int) -> Body:
    return {"request_put": {"key": key, "value": value, "lease": lease}}


def created(key: bytes, revision: int) -> Body:
    return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": revision}


def modified(key: bytes, revision: int) -> Body:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
