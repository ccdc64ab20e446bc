"""A store in Redis, which outlives processes and hosts; what else it outlives is the server's to say.

All that a job writes lies in one hash, see ``redis_scripts``, which ends a minute after the last process that
has the store open, or with the last one that closes it.

*Each write is one script*, and done once however often it is sent.  A client sends its writes on *lines*, one
at a time, and numbers them; the script notes the number and the reply beside the change.  When an answer is
lost, the write is sent again under its number: if it was done, the script returns the reply that it noted.  A
line of which a copy may still be on its way carries no other write, and its note stays as long as the hash:
whenever the copy arrives, it does nothing.

*A blocking read* subscribes to the channel of a key that is missing, looks whether the key has come
meanwhile, and waits for a message; whatever ends the wait, it looks again.

*A life*: each script compares the hash's ``life`` with the one that the store was opened in.  So a process
that was suspended while the hash ended is told so, and so is one whose server has lost what it held.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import SplitResult

from ... import config
from ...errors import AuthenticationError, StoreTimeout
from ...net import Deadline
from ..base import Store
from ..external import client as outside_client
from ..external.client import OutsideClient, parts
from ..external.tls import tls_context
from ..external.url import parse_outside
from ..operations import MAX_VALUE, ValueRefused, counted, too_long
from ..requests import (
    SHORT,
    Add,
    Append,
    Call,
    CompareSet,
    Delete,
    Set,
    Together,
    TogetherResult,
    too_long_found,
)
from .connection import Argument, ConnectionLost, RedisClient
from .job import RedisJob
from .scripts import READ, WRITE

T = TypeVar("T")

#: where a Redis listens unless told otherwise
_PORT = 6379
#: keys, and their bytes, in one request
_AT_ONCE, _KEYS = 100_000, 16 * 2**20
#: of a length or a number of keys, at most
_DIGITS = 18
#: longest key in bytes
MAX_REDIS_KEY = 2**20


class RedisStore(Store):
    """The keys of one job in Redis.

    Args:
        server: ``host:port``; of a cluster, any of its servers.
        job: whose keys these are: those of one name are shared.
        database: number of the database.
        tls: how to talk to the server; None: without encryption.
        user, password: for a server that asks for them.
        timeout: default deadline in seconds, for connecting too; ``SHOAL_TIMEOUT`` unless given.

    Raises:
        ConfigurationError: the package ``redis`` is missing.
        AuthenticationError: the server does not take this user, or one side the other's certificate.
        StoreTimeout: the server did not answer in time.
    """

    _backing: _RedisClient

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
        link = RedisClient(server, database, tls, user, password)
        try:
            life = RedisJob(link, job, deadline)
        except BaseException:
            link.close()
            raise
        super().__init__(_RedisClient(life), timeout)
        try:
            life.warn(deadline)
        except BaseException:  # a warning may be an error
            self.close()
            raise

    @property
    def key(self) -> str:
        """The name of the job's hash."""
        return self._backing.job.key


def open_redis(url: SplitResult, *, job: str, timeout: float | None) -> RedisStore:
    """The store of ``job`` that a URL of the schemes ``redis`` and ``rediss`` names.

    Raises:
        UsageError, ConfigurationError: the URL makes no sense, or a file that it names cannot be used.
    """
    encrypted = url.scheme == "rediss"
    named = parse_outside(url, _PORT, tls=encrypted, databases=True)
    return RedisStore(
        named.servers[0],
        job,
        database=named.database,
        tls=tls_context(named.ca, named.cert, named.key) if encrypted else None,
        user=named.user,
        password=named.password,
        timeout=timeout,
    )


class _RedisClient(OutsideClient[RedisJob]):
    """One store of a job."""

    longest_key = MAX_REDIS_KEY

    # -- reading -------------------------------------------------------------------------------

    def get_now(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        part = next(parts(keys, _AT_ONCE, _KEYS))
        found = self._read(list[bytes | None], "get", MAX_VALUE, *map(_field, part))
        if not 1 <= len(found) <= len(part):
            raise self.job.unreadable(found)
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        missing: list[str] = []
        for part in parts(keys, _AT_ONCE, _KEYS):
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
        """Return when the last of ``keys`` is set: with several, it is likely the last."""
        key = keys[-1]
        silence = Deadline(min(deadline.remaining(), outside_client.SILENCE))
        try:
            with (
                self.job.link.subscribed(f"{self.job.key}:{key}", deadline) as messages,
                self._watching(messages) as open_still,
            ):
                if open_still and self.missing([key]):
                    messages.wait(silence.remaining())
        except (ConnectionLost, AuthenticationError, StoreTimeout):
            self._paused(deadline)  # the look will tell

    def _read(self, kind: type[T], what: str, *arguments: Argument) -> T:
        deadline = self._calls.deadline
        given = (what, self.job.life, *arguments)
        word, found = self.job.run(READ, given, kind, deadline, self.closed)
        if word != b"done" or found is None:
            raise self.job.unreadable(word)
        return found

    # -- writing -------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        self.set_many([(key, value)])

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        if items:
            self._write("set", *(each for key, value in items for each in (_field(key), value)))

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        word, _ = self._write("swap", _field(key), _optional(held), _optional(value))
        return word == b"done"

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        held: bytes = self._one(CompareSet(key, expected, desired))
        return held

    def add(self, key: str, amount: int) -> int:
        total: int = self._one(Add(key, amount))
        return total

    def append(self, key: str, value: bytes) -> None:
        self._one(Append(key, value))

    def delete(self, key: str) -> bool:
        existed: bool = self._one(Delete(key))
        return existed

    def together(self, calls: Sequence[Any], one_by_one: object) -> Any:
        changes = [_change(call) for call in calls]
        _, reply = self._write("together", SHORT, *(each for change in changes for each in change))
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
            if isinstance(call, Add) and word == b"held":  # the script has ended there
                rest = Together(list(calls[len(results) :])).apply(self)
                return TogetherResult([*results, *rest.results], rest.failure)
        return TogetherResult(results)

    def _one(self, call: Call) -> Any:
        return self._result(call, *self._write(*_change(call)))

    def _result(self, call: Call, word: bytes, value: bytes) -> Any:
        """What the script's answer to a call means."""
        if isinstance(call, Add):
            if word == b"held":
                counted(call.key, value, call.amount)  # Redis adds to fewer numbers: why this is none, or
                return super().add(call.key, call.amount)  # as with one that begins with zeros
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
        """The word and the value of each change that the script has made at once."""
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
        """The word that the script answers, and the value that comes with it."""
        deadline = self._calls.deadline
        with self.job.line() as line:
            given = (what, self.job.life, line.name, line.number, *arguments)
            word, value = self.job.run(WRITE, given, bytes, deadline, self.closed, writes=line.doubt)
        if word not in _ANSWERS[what] or (value is None) is not (word == b"unchanged"):
            raise self.job.unreadable(word)
        return word, value or b""


#: the words with which the script of writes answers; but for "unchanged" a value comes with each
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
    """A call as the script takes it."""
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
    """The field of the hash in which a key's value is."""
    return "k" + key


def _optional(value: bytes | None) -> bytes:
    return b"n" if value is None else b"v" + value
