"""A TCP store's server whose acknowledged data is on disk and survives it.

In each *round* the server takes the pending messages of all clients, executes them in order, writes those
that changed something to its log as one record, and waits for the disk once. It answers only then, so that
all clients that write at the same time share the cost of the disk. If the disk accepts no more data, the
changes are undone and their clients notified, before any client has seen them.

A restarted server has the same data and identity, and the replies that clients may still request: they
reconnect and send their last request again with its number, and nothing is executed twice.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ...errors import ShoalError, StoreError, UsageError, WireError
from ...net import HANDSHAKE_TIMEOUT_S
from ..operations import KeyTable
from ..requests import MultiSet
from .journal import InDoubt, Journal, NotWritten, Snapshot
from .protocol import Numbered, Status, Welcome, decode_request, encode_reply, encode_request
from .replies import LastWrite, Replies
from .server import TCPStoreServer, _StoreClient

logger = logging.getLogger(__name__)

#: seconds between two attempts to rewrite a log whose disk has failed
_REPAIR_INTERVAL_S = 1.0

#: exceptions of a failed rewrite of the log
_FAILURES = (OSError, ShoalError, InDoubt)


class _UndoableTable(KeyTable):
    """A table that records the former values of changed keys in ``before``, which its owner clears."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, bytes | None] = {}

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        self.before.setdefault(key, self.values.get(key))
        return super().swap(key, held, value)

    def set(self, key: str, value: bytes) -> None:
        self.before.setdefault(key, self.values.get(key))
        super().set(key, value)

    def undo(self) -> None:
        """Restore all values to those at the time when ``before`` was empty."""
        for key, value in self.before.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value
        self.before.clear()


class _Taken(NamedTuple):
    """A message of the current round, and its client."""

    session: _StoreClient
    message: bytearray
    asked: Numbered


class DurableStoreServer(TCPStoreServer):
    """Hosts a store on a TCP port, as :class:`TCPStoreServer` does, and keeps its data in a directory.

    Acknowledged changes are on disk. While the server is down, clients wait for it until the deadline of
    their call.

    Args:
        log: the directory, for one server at a time; created if it does not exist.
        host, port, secret, handshake_timeout: as of :class:`TCPStoreServer`. A server that replaces another
            one must have the same address.
        records: initial keys and values; a key that the log holds keeps its value.

    Raises:
        ConfigurationError: other users own, or have access to, the directory or a file in it.
        StoreError: another server uses the directory, or the log in it is damaged or of another version.
        UsageError, WireError: as of :class:`TCPStoreServer`.
    """

    _table: _UndoableTable

    def __init__(
        self,
        log: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes = b"",
        *,
        records: Mapping[str, bytes] | None = None,
        handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._taken: list[_Taken] = []
        self._kept: dict[bytes, LastWrite | None] = {}
        #: why no write is possible until the log is rewritten; "": writes are possible
        self._broken = ""
        self._repair_at = 0.0
        #: writes of which it is unknown whether they are on disk; their clients have no answer
        self._in_doubt: set[tuple[bytes, int]] = set()
        with contextlib.ExitStack() as undo:
            self._journal = Journal(Path(log).absolute())
            undo.callback(self._journal.close)
            super().__init__(host, port, secret, records=records, handshake_timeout=handshake_timeout)
            undo.pop_all()

    def _hold(self, records: Mapping[str, bytes]) -> Welcome:
        self._table, self._replies = _UndoableTable(), Replies()
        loaded = self._journal.load()
        if loaded is None:
            self._name = secrets.token_bytes(16)
            self._table.values.update(records)
        else:
            snapshot, rounds = loaded
            self._name = snapshot.name
            self._table.values.update(snapshot.pairs)
            for line in snapshot.lines:
                self._replies.keep(*line)
            for messages in rounds:
                self._again(messages)
            self._replies = Replies(self._replies.lines(), time.monotonic())
        try:
            if loaded is None:
                self._journal.rewrite(self._snapshot())
            elif new := {key: value for key, value in records.items() if key not in self._table.values}:
                self._table.values.update(new)
                self._journal.append([encode_request(MultiSet([*new.items()]))])
        except (OSError, NotWritten, InDoubt) as error:
            raise StoreError(f"cannot write to the store's log {self._journal.path}: {error}") from error
        return Welcome(self._name, durable=True)

    def _again(self, messages: list[bytes]) -> None:
        try:
            for message in messages:
                request, line, number = decode_request(message)
                reply = encode_reply(Status.DONE, request.apply(self._table))
                if any(line):  # else the server wrote the record itself
                    self._replies.keep(line, number, reply, request)
        except (StoreError, WireError) as error:
            raise StoreError(
                f"the store's log {self._journal.path} contains a request that cannot be repeated: {error}"
            ) from error
        self._table.touched.clear()
        self._table.before.clear()

    def received(self, session: _StoreClient, message: bytearray) -> None:
        self._refuse_second(session)
        if any(each.session is session for each in self._taken[-1:]):
            raise WireError("the client sent a request before the last one was answered")
        self._taken.append(_Taken(session, message, decode_request(message)))

    def turned(self) -> None:
        taken, self._taken = [each for each in self._taken if not each.session.closed], []
        if not taken:
            return
        if self._broken and any(each.asked.line for each in taken):
            self._repair()
        answers: list[tuple[_Taken, bytes | bytearray]] = []
        changes: list[bytes | bytearray] = []
        for each in taken:
            with self._dropping(each):
                reply = self._refusal(each) or self._do(each, changes)
                if reply is not None:
                    answers.append((each, reply))
        touched, self._table.touched = self._table.touched, []
        if changes:
            try:
                self._write(changes)
            except NotWritten as error:
                self._take_back(taken, f"not done: the store's log could not be written: {error}")
                return
            except InDoubt as error:
                self._take_back(taken, f"not done: the disk of the store's log failed: {error}", changes)
                return
        self._table.before.clear()
        self._kept.clear()
        for each, reply in answers:
            self.send(each.session, reply)
        for key in dict.fromkeys(touched):
            self._wake(key)
        if self._journal.due:
            self._make_snapshot()

    def _do(self, each: _Taken, changes: list[bytes | bytearray]) -> bytes | bytearray | None:
        """Execute a request; return its reply, or None if it waits for keys."""
        line = each.asked.line
        if line and line not in self._kept:
            self._kept[line] = self._replies.last(line)
        before = len(self._table.touched)
        try:
            return self._execute(each.session, each.asked)
        finally:  # even after an error, changes that others can see must be in the log
            if len(self._table.touched) > before:
                changes.append(each.message)

    def _refusal(self, each: _Taken) -> bytes | bytearray | None:
        """Return the reply to a write while no write is possible; None: execute the request."""
        if not self._broken or not each.asked.line:
            return None
        if (each.asked.line, each.asked.number) in self._in_doubt:
            raise WireError("it is not known yet whether this write is on disk")
        return encode_reply(Status.FAILED, self._broken)

    def _take_back(
        self, taken: list[_Taken], why: str, in_doubt: list[bytes | bytearray] | None = None
    ) -> None:
        """Undo the round: refuse its writes, or drop the clients of those in doubt, and repeat its reads."""
        self._table.undo()
        for name, line in self._kept.items():
            self._replies.restore(name, line)
        self._kept.clear()
        if in_doubt is not None:
            self._broken, self._repair_at = why, time.monotonic() + _REPAIR_INTERVAL_S
            self._in_doubt.update(decode_request(message)[1:] for message in in_doubt)
        logger.warning("store: a round of %d requests was %s", len(taken), why)
        refusal = encode_reply(Status.FAILED, why)
        for each in taken:
            session = each.session
            if session.closed:
                continue
            if session.parked is not None:
                self._unpark(session)
            with self._dropping(each):
                if not each.asked.line:
                    reply = self._execute(session, each.asked)
                elif in_doubt is not None and each.asked[1:] in self._in_doubt:
                    raise WireError("it is not known whether this write is on disk")
                else:
                    reply = refusal
                if reply is not None:
                    self.send(session, reply)

    def _write(self, changes: list[bytes | bytearray]) -> None:
        try:
            self._journal.append(changes)
        except InDoubt:
            try:
                self._journal.rewrite(self._snapshot())  # includes this round, on other blocks of the disk
            except _FAILURES as error:
                raise InDoubt(str(error)) from error

    def _repair(self) -> None:
        """Rewrite the log, so that no write is in doubt any more."""
        if time.monotonic() < self._repair_at:
            return
        try:
            self._journal.rewrite(self._snapshot())
        except _FAILURES as error:
            logger.warning("store: the log cannot be rewritten: %s", error)
            self._repair_at = time.monotonic() + _REPAIR_INTERVAL_S
            return
        self._broken = ""
        self._in_doubt.clear()

    def _make_snapshot(self) -> None:
        try:
            self._journal.rewrite(self._snapshot())
        except InDoubt as error:
            self._broken = f"not done: the disk of the store's log failed: {error}"
        except _FAILURES as error:
            logger.warning("store: no snapshot was written, so the log keeps growing: %s", error)
            self._journal.postpone()

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._name, self._table.values, self._replies.lines())

    @contextlib.contextmanager
    def _dropping(self, each: _Taken) -> Iterator[None]:
        """Drop only the client whose request violates the protocol."""
        try:
            yield
        except (WireError, UsageError, OSError) as error:
            self.drop(each.session, str(error))
        except Exception:
            logger.exception("store: dropping client %s", each.session.name)
            self.drop(each.session, "an unexpected error")

    def _release(self) -> None:
        super()._release()
        self._journal.close()
