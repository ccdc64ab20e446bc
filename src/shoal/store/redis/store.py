"""A store in Redis, which survives the loss of processes and hosts; the rest depends on the server.

All data of a job is in one hash (see ``scripts.py``), which expires a minute after the last process that has
the store open, or is removed by the last one that closes it.

*Each write is one script*, executed once however often it is sent. A client sends its writes on *write
channels*, one at a time, and numbers them. The script stores the number and the reply together with the
change. If an answer is lost, the write is sent again with its number: if it was executed, the script returns
the stored reply. A channel with a copy that may be in transit is not used again, and its entry stays as long
as the hash: the copy changes nothing, whenever it arrives.

*A blocking read* subscribes to the pub/sub channel of a missing key, checks whether the key exists by now,
and waits for a message; when the wait ends, it reads again.

*A life*: each script compares the hash's ``life`` with the one of the opened store. So a process that was
suspended while the hash expired gets an error, and so does one whose server has lost its data.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

from ... import config
from ...errors import AuthenticationError, StoreTimeout
from ...net import Deadline
from ..base import Store
from ..external import job as external_job
from ..external.job import ExternalBacking, parts
from ..requests import (
    MAX_TOGETHER_BYTES,
    MAX_VALUE,
    Add,
    Append,
    Call,
    CompareSet,
    Delete,
    Set,
    StoreRequest,
    Together,
    TogetherResult,
    ValueRefused,
    counted,
    too_long,
    too_long_found,
)
from .connection import Argument, ConnectionLost, RedisClient
from .job import RedisJob
from .scripts import READ, WRITE

T = TypeVar("T")

#: maximum number of keys in one request, and of their bytes
_MAX_KEYS_PER_REQUEST, _KEYS = 100_000, 16 * 2**20
#: maximum number of digits of a length or a number of keys
_DIGITS = 18
#: longest key in bytes
MAX_REDIS_KEY = 2**20


class RedisStore(Store):
    """The keys of one job in Redis.

    Args:
        server: ``host:port``; in a cluster, any of its servers.
        job: name of the job; the stores of one job share their keys.
        database: number of the database.
        tls: TLS context for the server; None: no encryption.
        user, password: for a server with authentication.
        timeout: default deadline in seconds, also for connecting; None: ``SHOAL_TIMEOUT``.

    Raises:
        ConfigurationError: the package ``redis`` is missing.
        AuthenticationError: the server refuses the user, or one side refuses the other's certificate.
        StoreTimeout: the server did not answer in time.
    """

    _backing: _RedisBacking

    def __init__(
        self,
        server: str,
        job: str = "default",
        *,
        database: int = 0,
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout: float | None = None,
    ) -> None:
        timeout = config.TIMEOUT.get() if timeout is None else timeout
        deadline = Deadline(timeout)
        job_keys = RedisJob(RedisClient(server, database, tls, user, password), job, deadline)
        super().__init__(_RedisBacking(job_keys), timeout)
        try:
            job_keys.warn(deadline)
        except BaseException:  # warnings may be configured as errors
            self.close()
            raise

    @property
    def key(self) -> str:
        """The name of the job's hash."""
        return self._backing.job.key


class _RedisBacking(ExternalBacking[RedisJob]):
    longest_key = MAX_REDIS_KEY

    # -- reading -------------------------------------------------------------------------------

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        part = next(parts(keys, _MAX_KEYS_PER_REQUEST, _KEYS))
        found = self._read(list[bytes | None], "get", MAX_VALUE, *map(_field, part))
        if not 1 <= len(found) <= len(part):
            raise self.job.unreadable(found)
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        missing: list[str] = []
        for part in parts(keys, _MAX_KEYS_PER_REQUEST, _KEYS):
            found = self._read(list[int], "missing", *map(_field, part))
            if any(not 0 <= place < len(part) for place in found):
                raise self.job.unreadable(found)
            missing += [part[place] for place in found]
        return missing

    def list_keys(self, prefix: str) -> list[str]:
        found = self._read(list[bytes], "list", _field(prefix))
        try:
            return [each.decode()[1:] for each in found]
        except UnicodeDecodeError:
            raise self.job.unreadable(found) from None

    def count(self, prefix: str) -> int:
        found = self._read(list[int], "count", _field(prefix))
        if len(found) != 1:
            raise self.job.unreadable(found)
        return found[0]

    def watch(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Return when the last of ``keys`` is set, which likely happens last."""
        key = keys[-1]
        silence = Deadline(min(deadline.remaining(), external_job.WATCH_TIMEOUT_S))
        try:
            with (
                self.job.client.subscribed(f"{self.job.key}:{key}", deadline) as messages,
                self._watching(messages) as open_still,
            ):
                if open_still and self.missing([key]):
                    messages.wait(silence.remaining())
        except (ConnectionLost, AuthenticationError, StoreTimeout):
            self._paused(deadline)  # the next read finds out

    def _read(self, kind: type[T], what: str, *arguments: Argument) -> T:
        deadline = self._calls.deadline
        given = (what, self.job.life, *arguments)
        word, found = self.job.run(READ, given, kind, deadline, self.closed)
        if word != b"done" or found is None:
            raise self.job.unreadable(word)
        return found

    # -- writing -------------------------------------------------------------------------------

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        if items:
            self._write("set", *(each for key, value in items for each in (_field(key), value)))

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        word, _ = self._write("swap", _field(key), _optional(held), _optional(value))
        return word == b"done"

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._one(CompareSet(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        return self._one(Add(key, amount))

    def append(self, key: str, value: bytes) -> None:
        self._one(Append(key, value))

    def delete(self, key: str) -> bool:
        return self._one(Delete(key))

    def together(self, calls: Sequence[Call]) -> TogetherResult:
        changes = [_change(call) for call in calls]
        _, reply = self._write(
            "together", MAX_TOGETHER_BYTES, *(each for change in changes for each in change)
        )
        answers = self._answers(reply)
        results: list[Any] = []
        for call, (what, *_) in zip(calls, changes, strict=True):
            word, value = next(answers, (b"", b""))
            if word not in _ANSWERS[what]:
                raise self.job.unreadable(reply)
            try:
                results.append(self._result(call, word, value))
            except ValueRefused as error:
                return TogetherResult(results, str(error))
            if isinstance(call, CompareSet) and results[-1] != call.desired:
                break
            if isinstance(call, Add) and word == b"held":  # the script stopped there
                rest = Together(list(calls[len(results) :])).apply(self)
                return TogetherResult([*results, *rest.results], rest.failure)
        return TogetherResult(results)

    def _one(self, call: StoreRequest[T]) -> T:
        assert isinstance(call, Call)
        return cast(T, self._result(call, *self._write(*_change(call))))

    def _result(self, call: Call, word: bytes, value: bytes) -> Any:
        """Return the result of a call, given the script's answer."""
        if isinstance(call, Add):
            if word == b"held":
                counted(call.key, value, call.amount)  # raises if it is not a counter
                return super().add(call.key, call.amount)  # a form that Redis does not accept: leading zeros
            try:
                return int(value)
            except ValueError:
                raise self.job.unreadable(value) from None
        if isinstance(call, CompareSet):
            if word == b"long":
                raise ValueRefused(too_long_found(self._length(value)))
            return {b"done": call.desired, b"unchanged": call.expected}.get(word, value)
        if isinstance(call, Delete):
            return word == b"done"
        if word == b"long":
            raise too_long(call.key, self._length(value), MAX_VALUE)
        return None

    def _answers(self, reply: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the status and the value of each change made together."""
        while reply:
            word, _, rest = reply.partition(b" ")
            length, _, rest = rest.partition(b" ")
            cut = self._length(length)
            if cut > len(rest):
                raise self.job.unreadable(reply)
            yield word, rest[:cut]
            reply = rest[cut:]

    def _length(self, text: bytes) -> int:
        if not text.isdigit() or len(text) > _DIGITS:
            raise self.job.unreadable(text)
        return int(text)

    def delete_prefix(self, prefix: str) -> int:
        word, number = self._write("deletes", _field(prefix))
        return 0 if word == b"unchanged" else self._length(number)

    def _write(self, what: str, *arguments: Argument) -> tuple[bytes, bytes]:
        """Execute a write; return the script's status and value."""
        deadline = self._calls.deadline
        with self.job.channel() as channel:
            given = (what, self.job.life, channel.name, channel.number, *arguments)
            word, value = self.job.run(
                WRITE, given, bytes, deadline, self.closed, writes=channel.mark_unclear
            )
        if word not in _ANSWERS[what] or (value is None) is not (word == b"unchanged"):
            raise self.job.unreadable(word)
        return word, value or b""


#: the statuses with which the script answers each kind of write; a value comes with all but "unchanged"
_ANSWERS = {
    "set": (b"done",),
    "add": (b"done", b"held"),
    "append": (b"done", b"long"),
    "compare": (b"done", b"held", b"unchanged", b"long"),
    "swap": (b"done", b"unchanged"),
    "delete": (b"done", b"unchanged"),
    "deletes": (b"done", b"unchanged"),
    "together": (b"done",),
}


def _change(call: Call) -> tuple[str, str, Argument, Argument]:
    match call:
        case Set(key, value):
            return "set", _field(key), value, b""
        case Add(key, amount):
            return "add", _field(key), amount, b""
        case CompareSet(key, expected, desired):
            return "compare", _field(key), expected, desired
        case Append(key, value):
            return "append", _field(key), value, MAX_VALUE
        case Delete(key):
            return "delete", _field(key), b"", b""


def _field(key: str) -> str:
    """Return the field of the hash that holds a key's value."""
    return "k" + key


def _optional(value: bytes | None) -> bytes:
    return b"n" if value is None else b"v" + value
