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
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ...errors import ShoalError, StoreError, WireError
from ...net import HANDSHAKE_TIMEOUT_S, parse_address
from ..requests import KeyTable, MultiSet
from .journal import DurabilityUnknown, Journal, NotWritten, Snapshot
from .protocol import Numbered, Status, Welcome, decode_request, encode_reply, encode_request
from .replies import LastWrite, StoredReplies
from .server import TCPStoreServer, _StoreClient

logger = logging.getLogger(__name__)

#: seconds between two attempts to rewrite a log whose disk has failed
_REPAIR_INTERVAL_S = 1.0

#: exceptions of a failed rewrite of the log
_FAILURES = (OSError, ShoalError, DurabilityUnknown)


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


class _PendingRequest(NamedTuple):
    """A message of the current round, and its client."""

    client: _StoreClient
    message: bytearray
    numbered: Numbered


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
        secret: str | bytes = b"",
        *,
        records: Mapping[str, bytes] | None = None,
        handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._pending: list[_PendingRequest] = []
        self._former_writes: dict[bytes, LastWrite | None] = {}
        #: why no write is possible until the log is rewritten; "": writes are possible
        self._write_refusal = ""
        self._repair_at = 0.0
        #: writes of which it is unknown whether they are on disk; their clients have no answer
        self._in_doubt: set[tuple[bytes, int]] = set()
        with contextlib.ExitStack() as undo:
            self._journal = Journal(Path(log).absolute())
            undo.callback(self._journal.close)
            super().__init__(host, port, secret, records=records, handshake_timeout=handshake_timeout)
            undo.pop_all()

    def _create_table(self, records: Mapping[str, bytes]) -> Welcome:
        self._table, self._replies = _UndoableTable(), StoredReplies()
        loaded = self._journal.load()
        if loaded is None:
            self._name = secrets.token_bytes(16)
            self._table.values.update(records)
        else:
            snapshot, rounds = loaded
            self._name = snapshot.name
            self._table.values.update(snapshot.pairs)
            for channel in snapshot.last_writes:
                self._replies.store(*channel)
            for messages in rounds:
                self._replay_round(messages)
            self._replies = StoredReplies(self._replies.writes(), time.monotonic())
        try:
            if loaded is None:
                self._journal.rewrite(self._snapshot())
            elif new := {key: value for key, value in records.items() if key not in self._table.values}:
                self._table.values.update(new)
                self._journal.append([encode_request(MultiSet([*new.items()]))])
        except (OSError, NotWritten, DurabilityUnknown) as error:
            raise StoreError(f"cannot write to the store's log {self._journal.path}: {error}") from error
        return Welcome(self._name, durable=True)

    def _replay_round(self, messages: list[bytes]) -> None:
        try:
            for message in messages:
                request, channel, number = decode_request(message)
                reply = encode_reply(Status.DONE, request.apply(self._table))
                if any(channel):  # else the server wrote the record itself
                    self._replies.store(channel, number, reply, request)
        except (StoreError, WireError) as error:
            raise StoreError(
                f"the store's log {self._journal.path} contains a request that cannot be repeated: {error}"
            ) from error
        self._table.touched.clear()
        self._table.before.clear()

    def on_message(self, client: _StoreClient, message: bytearray) -> None:
        self._refuse_second(
            client.parked is not None or any(each.client is client for each in self._pending[-1:])
        )
        self._pending.append(_PendingRequest(client, message, decode_request(message)))

    def on_round_end(self) -> None:
        pending, self._pending = [each for each in self._pending if not each.client.closed], []
        if not pending:
            return
        if self._write_refusal and any(each.numbered.channel for each in pending):
            self._repair()
        answers: list[tuple[_PendingRequest, bytes | bytearray]] = []
        changes: list[bytes | bytearray] = []
        for each in pending:
            with self._dropping_violators(each):
                reply = self._refusal(each) or self._perform(each, changes)
                if reply is not None:
                    answers.append((each, reply))
        touched, self._table.touched = self._table.touched, []
        if changes:
            try:
                self._write(changes)
            except NotWritten as error:
                self._undo_round(pending, f"not done: the store's log could not be written: {error}")
                return
            except DurabilityUnknown as error:
                self._undo_round(pending, f"not done: the disk of the store's log failed: {error}", changes)
                return
        self._table.before.clear()
        self._former_writes.clear()
        for each, reply in answers:
            self.send(each.client, reply)
        for key in dict.fromkeys(touched):
            self._wake(key)
        if self._journal.due:
            self._write_snapshot()

    def _perform(self, each: _PendingRequest, changes: list[bytes | bytearray]) -> bytes | bytearray | None:
        """Execute a request; return its reply, or None if it waits for keys."""
        channel = each.numbered.channel
        if channel and channel not in self._former_writes:
            self._former_writes[channel] = self._replies.last(channel)
        before = len(self._table.touched)
        try:
            return self._execute(each.client, each.numbered)
        finally:  # even after an error, changes that others can see must be in the log
            if len(self._table.touched) > before:
                changes.append(each.message)

    def _refusal(self, each: _PendingRequest) -> bytes | bytearray | None:
        """Return the reply to a write while no write is possible; None: execute the request."""
        if not self._write_refusal or not each.numbered.channel:
            return None
        if (each.numbered.channel, each.numbered.number) in self._in_doubt:
            raise WireError("it is not known yet whether this write is on disk")
        return encode_reply(Status.FAILED, self._write_refusal)

    def _undo_round(
        self, pending: list[_PendingRequest], why: str, in_doubt: list[bytes | bytearray] | None = None
    ) -> None:
        """Undo the round: refuse its writes, or drop the clients of those in doubt, and repeat its reads."""
        self._table.undo()
        for name, channel in self._former_writes.items():
            self._replies.restore(name, channel)
        self._former_writes.clear()
        if in_doubt is not None:
            self._write_refusal, self._repair_at = why, time.monotonic() + _REPAIR_INTERVAL_S
            self._in_doubt.update(decode_request(message)[1:] for message in in_doubt)
        logger.warning("store: a round of %d requests was %s", len(pending), why)
        refusal = encode_reply(Status.FAILED, why)
        for each in pending:
            client = each.client
            if client.closed:
                continue
            if client.parked is not None:
                self._unpark(client)
            with self._dropping_violators(each):
                if not each.numbered.channel:
                    reply = self._execute(client, each.numbered)
                elif in_doubt is not None and each.numbered[1:] in self._in_doubt:
                    raise WireError("it is not known whether this write is on disk")
                else:
                    reply = refusal
                if reply is not None:
                    self.send(client, reply)

    def _write(self, changes: list[bytes | bytearray]) -> None:
        try:
            self._journal.append(changes)
        except DurabilityUnknown:
            try:
                self._journal.rewrite(self._snapshot())  # includes this round, on other blocks of the disk
            except _FAILURES as error:
                raise DurabilityUnknown(str(error)) from error

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
        self._write_refusal = ""
        self._in_doubt.clear()

    def _write_snapshot(self) -> None:
        try:
            self._journal.rewrite(self._snapshot())
        except DurabilityUnknown as error:
            self._write_refusal = f"not done: the disk of the store's log failed: {error}"
        except _FAILURES as error:
            logger.warning("store: no snapshot was written, so the log keeps growing: %s", error)
            self._journal.postpone()

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._name, self._table.values, self._replies.writes())

    @contextlib.contextmanager
    def _dropping_violators(self, each: _PendingRequest) -> Iterator[None]:
        """Drop only the client whose request violates the protocol."""
        try:
            yield
        except Exception as error:
            self.drop_after(each.client, error)

    def _release(self) -> None:
        super()._release()
        self._journal.close()


def make_server(
    address: str,
    *,
    secret: bytes,
    records: Mapping[str, bytes] | None = None,
    log: str | Path | None = None,
) -> TCPStoreServer:
    """Return the server of :func:`serve`, which has not started."""
    host, port = parse_address(address)
    if log is None:
        return TCPStoreServer(host, port, secret, records=records)
    return DurableStoreServer(log, host, port, secret, records=records)


def serve(
    address: str,
    *,
    secret: bytes,
    records: Mapping[str, bytes] | None = None,
    log: str | Path | None = None,
    announce: Callable[[str], None] = lambda url: None,
    stop: threading.Event | None = None,
) -> None:
    """Host a store until ``stop`` is set or a signal ends the process.

    Args:
        address: ``host:port``, or ``host`` for a port that the kernel chooses; IPv6 in brackets.
        secret: every client must prove to know it; required except on loopback.
        records: initial keys and values, such as the job's record.
        log: directory for the data, see :class:`DurableStoreServer`; None: in memory only.
        announce: called with the store's URL when clients can connect.
        stop: ends the server when set, by a signal handler or another thread.

    Raises:
        UsageError: the address is malformed, or requires a secret.
        ConfigurationError, StoreError: the directory cannot be used.
        WireError: the address is in use, or does not belong to this host.
    """
    with make_server(address, secret=secret, records=records, log=log) as server:
        announce(server.url)
        (stop or threading.Event()).wait()
