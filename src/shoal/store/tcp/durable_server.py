"""A TCP store's server whose data outlives it: what it has acknowledged is on disk.

The server takes the messages of all clients that have sent one, applies them in their order, writes those
that changed something to its log as one record, and waits for the disk once.  Only then it answers: the cost
of the disk is shared by all who write at the same time.  If the disk takes no more, the changes are undone
and their clients told so, before anybody has seen them.

A server that is started on the log again holds the same data under the same name, and the replies that
clients may still ask for: they connect again, send their last request under its number, and nothing is done
twice.
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
from ...net import HANDSHAKE_TIMEOUT
from ..operations import KeyTable
from ..requests import MultiSet
from .journal import InDoubt, Journal, NotWritten, Snapshot
from .protocol import Numbered, Status, Welcome, decode_request, encode_reply, encode_request
from .replies import LastWrite, Replies
from .server import TCPStoreServer, _StoreClient

logger = logging.getLogger(__name__)

#: seconds between two attempts to begin a log anew whose disk has failed
_REPAIR_PAUSE = 1.0

#: of a log that is begun anew
_FAILURES = (OSError, ShoalError, InDoubt)


class _UndoableTable(KeyTable):
    """A table that remembers what its keys held before: ``before`` is emptied by the owner."""

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
        """Make everything as it was when ``before`` was empty."""
        for key, value in self.before.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value
        self.before.clear()


class _Taken(NamedTuple):
    """A message of the present round, and where it came from."""

    session: _StoreClient
    message: bytearray
    asked: Numbered


class DurableStoreServer(TCPStoreServer):
    """Hosts a store on a TCP port, as :class:`TCPStoreServer` does, and keeps its data in a directory.

    A change that was acknowledged is on disk.  Clients wait for the server, until the deadline of their call,
    while it is away.

    Args:
        log: the directory, for one server at a time; made when it does not exist.
        host, port, secret, handshake_timeout: as of :class:`TCPStoreServer`.  A server that takes the place
            of another one listens where that one did.
        records: keys and values that are there from the beginning; a key that the log holds keeps its value.

    Raises:
        ConfigurationError: the directory, or a file in it, is not this user's alone.
        StoreError: another server has the directory, or the log in it is damaged or of another version.
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
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        self._taken: list[_Taken] = []
        self._kept: dict[bytes, LastWrite | None] = {}
        #: why nothing can be written until the log was begun anew; "": it can
        self._broken = ""
        self._repair_at = 0.0
        #: writes that were neither done nor refused, as far as their clients know
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
        """Do what an earlier server did in one round."""
        try:
            for message in messages:
                request, line, number = decode_request(message)
                reply = encode_reply(Status.DONE, request.apply(self._table))
                if any(line):  # not a record of the server's own
                    self._replies.keep(line, number, reply, request)
        except (StoreError, WireError) as error:
            raise StoreError(
                f"the store's log {self._journal.path} holds a request that cannot be done again: {error}"
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
        """Execute a request: its reply, None if it waits for keys."""
        line = each.asked.line
        if line and line not in self._kept:
            self._kept[line] = self._replies.last(line)
        before = len(self._table.touched)
        try:
            return self._execute(each.session, each.asked)
        finally:  # whatever went wrong, what others can see is in the log
            if len(self._table.touched) > before:
                changes.append(each.message)

    def _refusal(self, each: _Taken) -> bytes | bytearray | None:
        """The reply to a write while nothing can be written; None: it can, or this is no write."""
        if not self._broken or not each.asked.line:
            return None
        if (each.asked.line, each.asked.number) in self._in_doubt:
            raise WireError("it is not known yet whether this write is on disk")
        return encode_reply(Status.FAILED, self._broken)

    def _take_back(
        self, taken: list[_Taken], why: str, in_doubt: list[bytes | bytearray] | None = None
    ) -> None:
        """Undo the round: refuse its writes, or leave them open, and read again for those who read."""
        self._table.undo()
        for name, line in self._kept.items():
            self._replies.restore(name, line)
        self._kept.clear()
        if in_doubt is not None:
            self._broken, self._repair_at = why, time.monotonic() + _REPAIR_PAUSE
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
                self._journal.rewrite(self._snapshot())  # with this round, and on other blocks of the disk
            except _FAILURES as error:
                raise InDoubt(str(error)) from error

    def _repair(self) -> None:
        """Begin the log anew, so that no write is in doubt any more."""
        if time.monotonic() < self._repair_at:
            return
        try:
            self._journal.rewrite(self._snapshot())
        except _FAILURES as error:
            logger.warning("store: the log cannot be begun anew: %s", error)
            self._repair_at = time.monotonic() + _REPAIR_PAUSE
            return
        self._broken = ""
        self._in_doubt.clear()

    def _make_snapshot(self) -> None:
        try:
            self._journal.rewrite(self._snapshot())
        except InDoubt as error:
            self._broken = f"not done: the disk of the store's log failed: {error}"
        except _FAILURES as error:
            logger.warning("store: no snapshot was made, the log grows on: %s", error)
            self._journal.postpone()

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._name, self._table.values, self._replies.lines())

    @contextlib.contextmanager
    def _dropping(self, each: _Taken) -> Iterator[None]:
        """End the client alone whose request breaks the rules."""
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
