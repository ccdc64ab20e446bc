"""An append-only file of checksummed records that several processes write.

Layout: 8 bytes of magic, then records, each a header (length of the payload and its CRC-32, both
4 bytes little-endian) and the payload.  A process writes only while it holds the file's lock.

A process that is killed in the middle of a write leaves a record that reaches beyond the end of
the file.  It was never acknowledged; readers stop before it, and the next writer cuts it off.
Anything else that does not fit its checksum is damage to the file, and is reported.
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
    """One process's view of the file.

    Args:
        path: where it is.
        file: opened as ``trusted.py`` does; the log owns it from now on.
    """

    def __init__(self, path: Path, file: OpenedFile) -> None:
        self.path = path
        self._offset = len(_MAGIC)
        self._checked = False
        self._file = file
        close_in_forked_child(self)  # the lock goes with the file: a child must not keep it

    def fileno(self) -> int:
        """The descriptor, -1 when closed."""
        return self._file.fileno()

    @contextlib.contextmanager
    def locked(self, deadline: Deadline) -> Iterator[None]:
        """Hold the file's lock.  StoreTimeout if another process keeps it beyond the deadline."""
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
            # Waiting in the kernel would have no deadline; the pauses differ so that all get a turn.
            time.sleep(pause * random.random())
            pause = min(2 * pause, 0.005)
        try:
            yield
        finally:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)

    def read(self, *, locked: bool) -> Iterator[bytes]:
        """The payloads of the records that were added since the last call.

        Without the lock it ends at the first record that is not complete: a writer may be at work.
        With the lock it cuts off the unfinished record of a killed writer.

        Raises:
            StoreError: the file is no log, or (seen with the lock only) is damaged.
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
                return  # cut off and written anew while it was read
            self._offset = end
            yield payload

    def append(self, payload: bytes) -> None:
        """Write one record; the lock is held and everything before it has been read.

        When this returns the record survives the death of any process (not of the machine).

        Raises:
            StoreError: the file system took no more; the file is as before.
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
        """Let :meth:`read` begin from the first record again."""
        self._offset = len(_MAGIC)

    def close(self) -> None:
        """Close the file; it may be called twice."""
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
