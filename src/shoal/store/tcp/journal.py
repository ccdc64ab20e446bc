"""The directory of a durable store: a file to which one server appends, and a lock.

``log`` begins with a line that names the format. Records follow, each a header (length of the payload, its
CRC-32, and the CRC-32 of these two) and the payload: first a *snapshot* (identity of the data, all pairs, all
stored replies, and an end mark), then one record with the messages of each *round* of writes.

A snapshot is written to ``log.new``, which is renamed to ``log`` when it is completely on disk. So ``log`` is
complete except for the last round, and only one round at a time is being written:

- A last record that is truncated, or has a sector of zeros, was never acknowledged. It is removed.
- Any other record that does not match its checksum is damage, and the file is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec

from ...common.decoding import MalformedMessage, msgpack_decoder
from ...common.trusted_file import TrustedFile, open_trusted
from ...errors import ConfigurationError, StoreError
from ...net import close_in_forked_child
from .replies import LastWrite

_MAGIC = b"shoal store log 1\n"
_HEADER, _CHECK = struct.Struct("<QI"), struct.Struct("<I")
_HEADER_SIZE = _HEADER.size + _CHECK.size
_SECTOR = 512

#: maximum bytes of pairs in one record of a snapshot, unless a single pair has more
_CHUNK = 2**20

#: a snapshot is due when the rounds since the last one have this many bytes, and this multiple of its size
SNAPSHOT_BYTES, _SNAPSHOT_TIMES = 64 * 2**20, 4


class NotWritten(Exception):
    """The round is not on disk, and a restart will not find it there."""


class DurabilityUnknown(Exception):
    """It is unknown whether the round is on disk, and no write is possible before a snapshot."""


class _Identity(msgspec.Struct, frozen=True, array_like=True, tag=1):
    name: bytes


class _Pairs(msgspec.Struct, frozen=True, array_like=True, tag=2):
    items: list[tuple[str, bytes]]


class _LastWrites(msgspec.Struct, frozen=True, array_like=True, tag=3):
    last_writes: list[LastWrite]


class _End(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The end mark of a snapshot."""


class _Round(msgspec.Struct, frozen=True, array_like=True, tag=5):
    messages: list[bytes]


_encode = msgspec.msgpack.Encoder().encode
_Record = _Identity | _Pairs | _LastWrites | _End | _Round
_decode = msgpack_decoder(_Record)


class Snapshot(msgspec.Struct):
    """All data of a server; ``name`` is its identity, which clients know."""

    name: bytes
    pairs: dict[str, bytes]
    last_writes: list[LastWrite]


class Journal:
    """The directory, which one server at a time can open.

    Args:
        path: the directory; created with mode 700 if it does not exist.

    Raises:
        ConfigurationError: other users own, or have access to, the directory or a file in it.
        StoreError: it cannot be opened, or another server has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TrustedFile | None = None
        self._end = 0
        self._snapshot_size = 0
        self._due = SNAPSHOT_BYTES
        try:
            _own_directory(path)
            self._lock = open_trusted(path / "lock")
            close_in_forked_child(self)
            self._take()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / "log.new")  # left by a killed server
        except OSError as error:
            raise StoreError(f"cannot open the store's log {path}: {error.strerror}") from error

    @property
    def due(self) -> bool:
        """Whether a snapshot is due."""
        return self._end - self._snapshot_size >= self._due

    def load(self) -> tuple[Snapshot, Iterator[list[bytes]]] | None:
        """Return the snapshot and the messages of each later round; None: the directory is new.

        The iterator truncates an unfinished round at the end of the file.

        Raises:
            StoreError: the file is damaged or of another format.
        """
        path = self.path / "log"
        if not os.path.lexists(path):
            return None
        self._file = open_trusted(path)
        magic = os.pread(self._file.fileno(), len(_MAGIC), 0)
        if magic != _MAGIC:
            raise StoreError(
                f"{path} begins with {magic!r}, not with {_MAGIC!r}: it is from another version of shoal, or "
                "not a store's log.  Use that version, or give another directory"
            )
        self._end = len(_MAGIC)
        records = self._records()
        snapshot = Snapshot(b"", {}, [])
        for record in records:
            if isinstance(record, _Identity):
                snapshot.name = record.name
            elif isinstance(record, _Pairs):
                snapshot.pairs.update(record.items)
            elif isinstance(record, _LastWrites):
                snapshot.last_writes += record.last_writes
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
        """Write one round; it is on disk on return.

        Raises:
            NotWritten: the file system accepted no more data; the file is unchanged.
            DurabilityUnknown: it is unknown whether the round is on disk.
        """
        assert self._file is not None
        record = _framed(_encode(_Round(cast(list[bytes], messages))))
        try:
            end = self._file.write_at(self._end, record)
        except OSError as error:
            try:
                os.ftruncate(self._file.fileno(), self._end)
            except OSError as another:
                raise DurabilityUnknown(another.strerror) from error
            raise NotWritten(error.strerror) from error
        try:
            os.fdatasync(self._file.fileno())
        except OSError as error:
            # File systems differ in their treatment of pages that could not be written: nothing in this file
            # can be relied on from here on.
            raise DurabilityUnknown(error.strerror) from error
        self._end = end

    def rewrite(self, snapshot: Snapshot) -> None:
        """Replace the file by one with a snapshot; it is on disk on return.

        Raises:
            OSError, ShoalError: the file system accepted no more data. The former file remains.
            DurabilityUnknown: the new file is used, but its name may refer to the former one if the machine
                fails.
        """
        temporary = self.path / "log.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        file = open_trusted(temporary)
        try:
            end = file.write_at(0, _MAGIC)
            for record in _records_of(snapshot):
                end = file.write_at(end, _framed(_encode(record)))
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
            folder = TrustedFile(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder.fileno())
            finally:
                folder.close()
        except OSError as error:
            raise DurabilityUnknown(error.strerror) from error

    def postpone(self) -> None:
        """Write no snapshot before the file has grown by another SNAPSHOT_BYTES."""
        self._due += SNAPSHOT_BYTES

    def close(self) -> None:
        """Release the directory. May be called twice."""
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
        with contextlib.suppress(OSError):  # a full disk: the process id is for messages only
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)

    def _rounds(self, records: Iterator[_Record]) -> Iterator[list[bytes]]:
        for record in records:
            if not isinstance(record, _Round):
                raise self._damaged("a record of a snapshot is among the rounds")
            yield record.messages
        assert self._file is not None
        try:
            if os.fstat(self._file.fileno()).st_size > self._end:
                os.ftruncate(self._file.fileno(), self._end)
            # Rounds that the former server wrote without syncing them are acknowledged from now on.
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(f"cannot open the store's log {self.path}: {error.strerror}") from error

    def _records(self) -> Iterator[_Record]:
        """Yield the records from the present end on, up to an unfinished one."""
        assert self._file is not None
        file = self._file
        size = os.fstat(file.fileno()).st_size
        while self._end < size:
            start = self._end
            header = file.read_at(start, _HEADER_SIZE)
            if len(header) < _HEADER_SIZE:
                return
            body = start + _HEADER_SIZE
            if _CHECK.unpack_from(header, _HEADER.size)[0] != zlib.crc32(header[: _HEADER.size]):
                if _has_empty_sector(file.read_at(start, _SECTOR - start % _SECTOR), start):
                    return
                raise self._damaged()
            length, checksum = _HEADER.unpack_from(header)
            if body + length > size:
                return
            payload = file.read_at(body, length)
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
            f"{self.path / 'log'} is damaged at byte {self._end} ({why}), in a way that a killed server does "
            "not cause: acknowledged changes may be lost.  Restore it from a backup, or give another "
            "directory and start the jobs again"
        )


def _own_directory(path: Path) -> None:
    """Create the directory if necessary; ConfigurationError unless only this user can write to it."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700, parents=True)
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        why = "it is a symbolic link; give the path that it leads to"
    elif not stat.S_ISDIR(found.st_mode):
        why = "it is not a directory"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to user {found.st_uid}; give a directory of your own"
    elif stat.S_IMODE(found.st_mode) & 0o022:
        why = f"others can write to it (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it, or give another"
    else:
        return
    raise ConfigurationError(f"refusing the store's log {path}: {why}")


def _records_of(snapshot: Snapshot) -> Iterator[_Record]:
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
    for at in range(0, len(snapshot.last_writes), 64):
        yield _LastWrites(snapshot.last_writes[at : at + 64])
    yield _End()


def _framed(payload: bytes) -> bytes:
    header = _HEADER.pack(len(payload), zlib.crc32(payload))
    return b"".join((header, _CHECK.pack(zlib.crc32(header)), payload))


def _has_empty_sector(data: bytes, at: int) -> bool:
    """Return whether all of ``data`` (at offset ``at``) in some sector is zero, as if never written."""
    first = _SECTOR - at % _SECTOR
    edges = [0, *range(first, len(data), _SECTOR), len(data)]
    return any(not any(data[a:b]) for a, b in itertools.pairwise(edges) if b > a)
