"""An append-only file of checksummed records, written by several processes.

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
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from ...common.trusted_file import OpenedFile
from ...common.wording import in_seconds
from ...errors import StoreError, StoreTimeout
from ...net import Deadline, close_in_forked_child

_MAGIC = b"shoallg1"
_HEADER = struct.Struct("<II")


class LogFile:
    """One process's view of the log; it owns ``file``, which ``common/trusted_file.py`` has opened."""

    def __init__(self, path: Path, file: OpenedFile) -> None:
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
                        f"{in_seconds(deadline.timeout)}; is it stopped?"
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
            payload = self._pread(length, self._offset + _HEADER.size)
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
        record = memoryview(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
        end = self._offset
        try:
            while record:
                written = os.pwrite(self._file.fileno(), record, end)
                record = record[written:]
                end += written
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._offset)
            raise StoreError(f"cannot write to file store {self.path}: {error.strerror}") from error
        self._offset = end

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

    def _pread(self, count: int, offset: int) -> bytes:
        parts = []
        while count:
            part = os.pread(self._file.fileno(), count, offset)
            if not part:
                break
            parts.append(part)
            count -= len(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
