"""A store in a file, for processes that share nothing but a disk.

The file is a log, to which several processes append checksummed records.

Layout: 8 bytes of magic, then records. A record is a header (length of the payload and its CRC-32, each
4 bytes little-endian) and the payload. A process writes only while it holds the file's lock.

A process that is killed during a write leaves a record that extends beyond the end of the file. It was never
acknowledged: readers stop before it, and the next writer truncates it. Any other record that does not match
its checksum is reported as damage to the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ..common.decoding import MalformedMessage
from ..common.formatting import format_seconds
from ..common.trusted_file import TrustedFile, open_trusted, reopen_trusted
from ..errors import StoreError, StoreTimeout
from ..net import Deadline, close_in_forked_child
from .backing import RequestExecutor
from .base import Store
from .requests import KeyTable, StoreRequest, decode, encode

T = TypeVar("T")

_MAGIC = b"shoallg1"
_HEADER = struct.Struct("<II")

#: seconds beyond its deadline for which a call waits for other threads
_REPLY_MARGIN_S = 2.0


class FileStore(Store):
    """A store in a log file: every process appends its changes, and replays the file into its own memory.

    A request that changes something holds the file's lock while it reads new records, applies itself and
    appends itself; a request that only reads takes no lock. A process may be killed at any moment:
    acknowledged changes remain, the next writer truncates an unfinished record, and the
    kernel releases the lock.

    The store never removes the file: only the user knows when the last process has finished.
    The file may contain a job's secret. A file that another user made or could read is refused
    (see ``common/trusted_file.py``).

    Args:
        path: the file; created with mode 600 if it does not exist.
        timeout: default deadline in seconds; None: ``SHOAL_TIMEOUT``.
        descriptor: of the file, if it is already open: it stays open, and the path is used in messages only.

    Raises:
        ConfigurationError: the file is a link, or another user owns it or has access to it.
        StoreError: the file cannot be opened.
    """

    _backing: _File

    def __init__(
        self, path: str | Path, *, timeout: float | None = None, descriptor: int | None = None
    ) -> None:
        super().__init__(_File(Path(path).absolute(), descriptor), timeout)

    @property
    def path(self) -> Path:
        """The file."""
        return self._backing.path


class _File(RequestExecutor):
    """The log, and a table of all records read so far."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        super().__init__()
        self.path = path
        opened = open_trusted(path) if descriptor is None else reopen_trusted(descriptor, path)
        self._log = LogFile(path, opened)
        self._table = KeyTable()
        self._mutex = threading.Lock()  # the file's lock does not exclude threads of one process

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        with self._exclusive(deadline):
            if request.writes:
                with self._log.locked(deadline):
                    return self._write(request)
            self._replay(locked=False)
            return request.apply(self._table)

    def clone(self, timeout: float) -> _File:
        """Open the same file again, even if its path now names another one."""
        with self._exclusive(Deadline(timeout)):
            return _File(self.path, self._log.fileno())

    def close(self) -> None:
        """Close the file, after a request in progress has completed."""
        with self._mutex:
            self._log.close()

    def _write(self, request: StoreRequest[T]) -> T:
        self._replay(locked=True)
        try:
            result = request.apply(self._table)
            if self._table.touched:
                self._log.append(encode(request))
        except BaseException:
            # The table may hold a change that the log does not: read the log again.
            self._table = KeyTable()
            self._log.rewind()
            raise
        self._table.touched.clear()
        return result

    def _replay(self, *, locked: bool) -> None:
        try:
            for payload in self._log.read(locked=locked):
                decode(payload).apply(self._table)
        except MalformedMessage as error:
            # Each call must fail at this record: read the log again.
            self._table = KeyTable()
            self._log.rewind()
            raise StoreError(f"file store {self.path} holds a record of another version: {error}") from error
        self._table.touched.clear()

    @contextlib.contextmanager
    def _exclusive(self, deadline: Deadline) -> Iterator[None]:
        """Exclude the other threads of this process."""
        # The holder may be waiting for another process, so even a call without time left waits for a while.
        if not self._mutex.acquire(timeout=deadline.remaining() + _REPLY_MARGIN_S):
            raise StoreTimeout(
                f"file store {self.path} was busy in another thread for {format_seconds(deadline.timeout)}"
            )
        try:
            if self.closed.is_set():
                raise StoreError("closed")  # Store replaces the message
            yield
        finally:
            self._mutex.release()

    def __str__(self) -> str:
        return f"FileStore on {self.path}"


class LogFile:
    """One process's view of the log; it owns ``file``, which ``common/trusted_file.py`` has opened."""

    def __init__(self, path: Path, file: TrustedFile) -> None:
        self.path = path
        self._offset = len(_MAGIC)
        self._checked = False
        self._file = file
        close_in_forked_child(self)  # a child that kept the file open would keep the lock

    def fileno(self) -> int:
        """Return the descriptor; -1 when closed."""
        return self._file.fileno()

    @contextlib.contextmanager
    def locked(self, deadline: Deadline) -> Iterator[None]:
        """Hold the file's lock. StoreTimeout if another process still holds it at the deadline."""
        pause = 0.0001
        while True:
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.expired:
                    raise StoreTimeout(
                        f"file store {self.path} stayed locked by another process for "
                        f"{format_seconds(deadline.timeout)}; is it stopped?"
                    ) from None
            # A blocking flock() has no deadline. The pauses are random so that every process gets a turn.
            time.sleep(pause * random.random())
            pause = min(2 * pause, 0.005)
        try:
            yield
        finally:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)

    def read(self, *, locked: bool) -> Iterator[bytes]:
        """Yield the payloads of the records that were added since the last call.

        Without the lock, stop at the first incomplete record: a writer may be writing it.
        With the lock, truncate the unfinished record of a killed writer.

        Raises:
            StoreError: the file is not a log, or is damaged (detected with the lock only).
        """
        self._check_magic(locked)
        while header := os.pread(self._file.fileno(), _HEADER.size, self._offset):
            end = self._offset + _HEADER.size
            if len(header) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                end += length
            if len(header) < _HEADER.size or end > os.fstat(self._file.fileno()).st_size:
                if locked:
                    os.ftruncate(self._file.fileno(), self._offset)
                return
            payload = self._file.read_at(self._offset + _HEADER.size, length)
            if not payload or zlib.crc32(payload) != checksum:
                if locked:
                    raise StoreError(f"file store {self.path} is damaged at byte {self._offset}: remove it")
                return  # truncated and rewritten during this read
            self._offset = end
            yield payload

    def append(self, payload: bytes) -> None:
        """Write one record. The caller holds the lock and has read everything before it.

        The record then survives the end of any process (not of the machine).

        Raises:
            StoreError: the file system accepted no more data; the file is unchanged.
        """
        record = _HEADER.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            self._offset = self._file.write_at(self._offset, record)
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._offset)
            raise StoreError(f"cannot write to file store {self.path}: {error.strerror}") from error

    def rewind(self) -> None:
        """Make :meth:`read` start again at the first record."""
        self._offset = len(_MAGIC)

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def _check_magic(self, locked: bool) -> None:
        if self._checked:
            return
        magic = os.pread(self._file.fileno(), len(_MAGIC), 0)
        if magic == _MAGIC:
            self._checked = True
        elif not _MAGIC.startswith(magic):
            raise StoreError(f"{self.path} is not a file store: it begins with {magic!r}")
        elif locked:
            os.pwrite(self._file.fileno(), _MAGIC, 0)
            self._checked = True
