"""The directory of a durable store: one file that a server appends to, and a lock.

``log`` begins with a line that names the format.  Records follow, each a header (length of the payload, its
CRC-32, and the CRC-32 of these two) and the payload: first a *snapshot* (who the server is, all pairs, all
kept replies, and an end mark), then one record for each *round* of writes, as the messages that carried them.

A snapshot is written to ``log.new``, which takes the name ``log`` when all of it is on disk.  So ``log`` is
whole but for the last round, and only one round at a time is on its way to disk:

- A last record that the file cuts short, or that has a sector of zeros, was never acknowledged.  It is cut
  off.
- Anything else that does not fit its checksum is damage, and the file is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec

from ...common.decoding import MalformedMessage, msgpack_decoder
from ...common.trusted_file import OpenedFile, open_trusted
from ...errors import ConfigurationError, StoreError
from ...net import close_in_forked_child
from .replies import LastWrite

_MAGIC = b"shoal store log 1\n"
_HEADER, _CHECK = struct.Struct("<QI"), struct.Struct("<I")
_HEADER_SIZE = _HEADER.size + _CHECK.size
_SECTOR = 512

#: bytes of pairs in one record of a snapshot, unless one pair has more
_CHUNK = 2**20

#: a snapshot is due when the rounds since the last one have this many bytes, and so many times its own
SNAPSHOT_BYTES, _SNAPSHOT_TIMES = 64 * 2**20, 4


class NotWritten(Exception):
    """The round is not on disk, and no restart will find it there."""


class InDoubt(Exception):
    """Whether the round is on disk is unknown, and nothing else can be written before a snapshot."""


class _Identity(msgspec.Struct, frozen=True, array_like=True, tag=1):
    name: bytes


class _Pairs(msgspec.Struct, frozen=True, array_like=True, tag=2):
    items: list[tuple[str, bytes]]


class _Lines(msgspec.Struct, frozen=True, array_like=True, tag=3):
    lines: list[LastWrite]


class _End(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The snapshot is complete."""


class _Round(msgspec.Struct, frozen=True, array_like=True, tag=5):
    messages: list[bytes]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgpack_decoder(_Identity | _Pairs | _Lines | _End | _Round)


class Snapshot(msgspec.Struct):
    """All that a server holds.

    Attributes:
        name: of the data, which clients know it by.
    """

    name: bytes
    pairs: dict[str, bytes]
    lines: list[LastWrite]


class Journal:
    """The directory, which no other server can have open.

    Args:
        path: the directory; made, with mode 700, when it does not exist.

    Raises:
        ConfigurationError: the directory, or a file in it, is not this user's alone.
        StoreError: it cannot be opened, or another server has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: OpenedFile | None = None
        self._end = 0
        self._snapshot_size = 0
        self._due = SNAPSHOT_BYTES
        try:
            _own_directory(path)
            self._lock = open_trusted(path / "lock")
            close_in_forked_child(self)
            self._take()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / "log.new")  # of a server that was killed
        except OSError as error:
            raise StoreError(f"cannot open the store's log {path}: {error.strerror}") from error

    @property
    def due(self) -> bool:
        """Whether it is time for a snapshot."""
        return self._end - self._snapshot_size >= self._due

    def load(self) -> tuple[Snapshot, Iterator[list[bytes]]] | None:
        """The snapshot, and the messages of each round after it; None: the directory is new.

        The end of the rounds cuts off one that was not finished.

        Raises:
            StoreError: the file is damaged, or of another format.
        """
        path = self.path / "log"
        if not os.path.lexists(path):
            return None
        self._file = open_trusted(path)
        magic = os.pread(self._file.fileno(), len(_MAGIC), 0)
        if magic != _MAGIC:
            raise StoreError(
                f"{path} begins with {magic!r}, not with {_MAGIC!r}: it is of another version of shoal, or "
                "no store's log.  Start that version on it, or give another directory"
            )
        self._end = len(_MAGIC)
        records = self._records()
        snapshot = Snapshot(b"", {}, [])
        for record in records:
            if isinstance(record, _Identity):
                snapshot.name = record.name
            elif isinstance(record, _Pairs):
                snapshot.pairs.update(record.items)
            elif isinstance(record, _Lines):
                snapshot.lines += record.lines
            else:
                break
        else:
            record = None
        if not isinstance(record, _End) or not snapshot.name:
            raise self._damaged("its snapshot has no end")
        self._snapshot_size = self._end
        self._due = max(SNAPSHOT_BYTES, _SNAPSHOT_TIMES * self._end)
        return snapshot, self._rounds(records)

    def append(self, messages: Sequence[bytes | bytearray]) -> None:
        """Write one round; it is on disk when this returns.

        Raises:
            NotWritten: the file system took no more; the file is as before.
            InDoubt: see there.
        """
        assert self._file is not None
        record = memoryview(_framed(_encode(_Round(cast(list[bytes], messages)))))
        descriptor = self._file.fileno()
        try:
            _write(descriptor, record, self._end)
        except OSError as error:
            try:
                os.ftruncate(descriptor, self._end)
            except OSError as another:
                raise InDoubt(another.strerror) from error
            raise NotWritten(error.strerror) from error
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            # What the kernel then does with the pages that it could not write differs from one file system to
            # another: nothing that this file holds from here on can be relied on.
            raise InDoubt(error.strerror) from error
        self._end += len(record)

    def rewrite(self, snapshot: Snapshot) -> None:
        """Begin the file anew with a snapshot; it is on disk when this returns.

        Raises:
            OSError, ShoalError: the file system took no more.  The file is the one before.
        InDoubt: the file is the new one, but its name may lead to the one before when the machine fails.
        """
        temporary = self.path / "log.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        file = open_trusted(temporary)
        try:
            end = _write(file.fileno(), memoryview(_MAGIC), 0)
            for record in _records_of(snapshot):
                end = _write(file.fileno(), memoryview(_framed(_encode(record))), end)
            os.fsync(file.fileno())
            os.rename(temporary, self.path / "log")
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if self._file is not None:
            self._file.close()
        self._file = file
        self._end = self._snapshot_size = end
        self._due = max(SNAPSHOT_BYTES, _SNAPSHOT_TIMES * end)
        try:
            folder = OpenedFile(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder.fileno())
            finally:
                folder.close()
        except OSError as error:
            raise InDoubt(error.strerror) from error

    def postpone(self) -> None:
        """Make no snapshot before the file has grown as much again."""
        self._due += SNAPSHOT_BYTES

    def close(self) -> None:
        """Let others have the directory; it may be called twice."""
        if self._file is not None:
            self._file.close()
        self._lock.close()

    def _take(self) -> None:
        descriptor = self._lock.fileno()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            self._lock.close()
            raise StoreError(
                f"another store server (process {holder or 'unknown'}) has the log {self.path} open; "
                "end it, or give another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # a full disk: it is there for messages alone
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)

    def _rounds(
        self, records: Iterator[_Identity | _Pairs | _Lines | _End | _Round]
    ) -> Iterator[list[bytes]]:
        for record in records:
            if not isinstance(record, _Round):
                raise self._damaged("a record of a snapshot stands among the rounds")
            yield record.messages
        assert self._file is not None
        try:
            if os.fstat(self._file.fileno()).st_size > self._end:
                os.ftruncate(self._file.fileno(), self._end)
            # What the server before wrote and did not live to sync is answered as done from now on.
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(f"cannot open the store's log {self.path}: {error.strerror}") from error

    def _records(self) -> Iterator[_Identity | _Pairs | _Lines | _End | _Round]:
        """The records from the present end on; it ends before one that was not finished."""
        assert self._file is not None
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        while self._end < size:
            start = self._end
            header = _read(descriptor, _HEADER_SIZE, start)
            if len(header) < _HEADER_SIZE:
                return
            body = start + _HEADER_SIZE
            if _CHECK.unpack_from(header, _HEADER.size)[0] != zlib.crc32(header[: _HEADER.size]):
                if _has_empty_sector(_read(descriptor, _SECTOR - start % _SECTOR, start), start):
                    return
                raise self._damaged()
            length, checksum = _HEADER.unpack_from(header)
            if body + length > size:
                return
            payload = _read(descriptor, length, body)
            if zlib.crc32(payload) != checksum:
                if body + length == size and _has_empty_sector(payload, body):
                    return
                raise self._damaged()
            try:
                record = _decode(payload)
            except MalformedMessage as error:
                raise self._damaged(str(error)) from error
            self._end = body + length
            yield record

    def _damaged(self, why: str = "a checksum does not fit") -> StoreError:
        return StoreError(
            f"{self.path / 'log'} is damaged at byte {self._end} ({why}), and not as a server leaves it that "
            "was killed: what was acknowledged may be lost.  Bring it back from a copy, or give another "
            "directory and start the jobs again"
        )


def _own_directory(path: Path) -> None:
    """Make the directory if it is not there; ConfigurationError unless nobody else can write to it."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700, parents=True)
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        why = "it is a symbolic link; give the path that it leads to"
    elif not stat.S_ISDIR(found.st_mode):
        why = "it is no directory"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to user {found.st_uid}; give a directory of your own"
    elif stat.S_IMODE(found.st_mode) & 0o022:
        why = f"others can write to it (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it, or give another"
    else:
        return
    raise ConfigurationError(f"refusing the store's log {path}: {why}")


def _records_of(snapshot: Snapshot) -> Iterator[_Identity | _Pairs | _Lines | _End]:
    yield _Identity(snapshot.name)
    items: list[tuple[str, bytes]] = []
    size = 0
    for key, value in snapshot.pairs.items():
        items.append((key, value))
        size += len(key) + len(value)
        if size >= _CHUNK:
            yield _Pairs(items)
            items, size = [], 0
    yield _Pairs(items)
    for part in _parts(snapshot.lines):
        yield _Lines(part)
    yield _End()


def _parts(lines: list[LastWrite]) -> Iterable[list[LastWrite]]:
    return (lines[at : at + 64] for at in range(0, len(lines), 64))


def _framed(payload: bytes) -> bytes:
    header = _HEADER.pack(len(payload), zlib.crc32(payload))
    return b"".join((header, _CHECK.pack(zlib.crc32(header)), payload))


def _write(descriptor: int, data: memoryview, at: int) -> int:
    """Write all of ``data`` at a place in a file; where it ends."""
    while data:
        written = os.pwrite(descriptor, data, at)
        data = data[written:]
        at += written
    return at


def _read(descriptor: int, count: int, at: int) -> bytes:
    """``count`` bytes from a place in a file, or as many as there are."""
    parts = []
    while count and (part := os.pread(descriptor, count, at)):
        parts.append(part)
        count -= len(part)
        at += len(part)
    return b"".join(parts)


def _has_empty_sector(data: bytes, at: int) -> bool:
    """Whether, of ``data`` at a place in a file, all that lies in one sector is zero, as if never written."""
    first = _SECTOR - at % _SECTOR
    edges = [0, *range(first, len(data), _SECTOR), len(data)]
    return any(not any(data[a:b]) for a, b in itertools.pairwise(edges) if b > a)
