"""The file to which a traced rank appends its operations while it runs.

It is a sequence of frames, each a length (u32, little-endian) and msgpack.  A length of 0 is the end of a
file that could not be written further.  It exists until the trace of the rank is written, so that the
operations of a rank that is killed are not lost.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from ..common.decoding import MalformedMessage, msgpack_decoder
from ..common.formatting import file_name_part

#: version of the format of the spool and of the trace that is made from it
SCHEMA = "shoal.trace/1"
#: ends of the names of traces and spools
TRACE_SUFFIX, SPOOL_SUFFIX = ".trace.json", ".trace.spool"
#: maximum number of operations in a file
MAX_OPERATIONS = 500_000

_LENGTH = struct.Struct("<I")
#: ``TraceEvent`` of ``cpp/engine/trace.h``
_RECORD = struct.Struct("<QQqqqqqQiiBBB5x")
_MAX_FRAME_BYTES = 1 << 30

MAX_TEXT = 1000
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Ident = Annotated[int, msgspec.Meta(ge=0)]


class OperationTimes(NamedTuple):
    """One operation that has ended; see ``TraceEvent`` in ``cpp/engine/trace.h``."""

    group: int
    channel: int
    submitted: int
    begun: int
    waited: int
    called: int
    ended: int
    bytes: int
    last: int
    peer: int
    kind: int
    failed: int
    keyed: int


class TracedRank(msgspec.Struct, kw_only=True, frozen=True):
    """The process that a trace is of.

    Attributes:
        job: the ``job_name`` of :class:`shoal.rendezvous.Membership`.
        epoch, meeting: of the membership; a world of torch without a meeting has its ``job`` instead.
        rank, size: in the world.
        host: identity of the host, as given to ``shoal.init``.
        hostname: name of the machine.
        clock: identity of the machine's CLOCK_MONOTONIC.
        begun: time of CLOCK_MONOTONIC at which the trace begins.
        realtime: time of CLOCK_REALTIME at that moment.  Both are in nanoseconds.
    """

    schema: str
    job: Text
    epoch: Rank
    meeting: Text
    rank: Rank
    size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    host: Text
    hostname: Text
    clock: Text
    begun: Nanoseconds
    realtime: Nanoseconds


class TracedGroup(msgspec.Struct, frozen=True, tag="group"):
    """A group; ``ranks`` are the ranks of its members in the world.

    The core records the operations of an ``internal`` group like others, but the trace does not show them.
    """

    ident: Ident
    name: str
    ranks: tuple[Rank, ...]
    lanes: Annotated[int, msgspec.Meta(ge=1, lt=2**20)]
    internal: bool = False


class _Begin(msgspec.Struct, tag="begin"):
    """The first frame."""

    rank: TracedRank


class _Operations(msgspec.Struct, tag="operations"):
    records: bytes


class _Lost(msgspec.Struct, tag="lost"):
    """Operations for which the core had no room; ``rest``: and all later ones, because the file is full."""

    operations: Annotated[int, msgspec.Meta(ge=0)]
    rest: bool


_decode_frame = msgpack_decoder(_Begin | TracedGroup | _Operations | _Lost)


class Spool:
    """A new spool in ``directory``, readable by the owner only.

    Attributes:
        path: of the spool.
        target: of the trace.
        full: whether it has the maximum number of operations.

    Raises:
        OSError: it cannot be created or written.
    """

    def __init__(self, directory: Path, rank: TracedRank) -> None:
        stem = f"shoal-{file_name_part(rank.job)}-{rank.rank}-{rank.pid}"
        for number in range(1, 10**6):  # a process can write several traces
            name = stem if number == 1 else f"{stem}-{number}"
            self.path = directory / f"{name}{SPOOL_SUFFIX}"
            self.target = directory / f"{name}{TRACE_SUFFIX}"
            if self.target.exists():
                continue
            with contextlib.suppress(FileExistsError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o600)
                break
        else:
            raise FileExistsError(0, "it has too many traces of this process", str(directory))
        self._operations = self._size = 0
        self.full = False
        try:
            self._write(_Begin(rank))
        except BaseException:
            self.close()
            self.path.unlink(missing_ok=True)
            raise

    def fileno(self) -> int:
        """The descriptor of the file; the program in C++ that gets it appends the same frames."""
        return self._fd

    def add_group(self, group: TracedGroup) -> None:
        """Append the description of a group, before the first of its operations."""
        self._write(group)

    def add(self, records: bytes, dropped: int) -> None:
        """Append the result of ``Context.take_trace()``; sets :attr:`full`."""
        room = MAX_OPERATIONS - self._operations
        count = len(records) // _RECORD.size
        self.full = self.full or count > room
        if count and room > 0:
            self._write(_Operations(records[: room * _RECORD.size]))
            self._operations += min(count, room)
        if dropped or count > room:
            self._write(_Lost(dropped + max(0, count - room), self.full))

    def _write(self, frame: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(frame)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        size = self._size + len(left)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:  # the disk may be full
            os.ftruncate(self._fd, self._size)  # to the last complete frame
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size + _LENGTH.size)  # zeros, which need no space
            raise
        self._size = size

    def close(self) -> None:
        """Close the file, which stays in its directory."""
        os.close(self._fd)


class SpoolContents(NamedTuple):
    """The contents of a spool, up to its last complete frame.

    ``dropped`` is the number of missing operations; ``truncated``: later ones are missing too.
    """

    rank: TracedRank
    groups: dict[int, TracedGroup]
    operations: Sequence[bytes]
    dropped: int
    truncated: bool

    def records(self) -> Iterator[OperationTimes]:
        """The operations that the trace shows, in the order in which they ended."""
        internal = {group.ident for group in self.groups.values() if group.internal}
        for each in self.operations:
            for record in map(OperationTimes._make, _RECORD.iter_unpack(each)):
                if record.group not in internal:
                    yield record


def read_spool(path: Path) -> SpoolContents:
    """Read a spool, whose last frame may be incomplete.

    Raises:
        MalformedMessage: it is not a spool of this release.
        OSError: it cannot be read.
    """
    rank: TracedRank | None = None
    groups: dict[int, TracedGroup] = {}
    operations: list[bytes] = []
    dropped, truncated = 0, False
    with open(path, "rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length == 0:
                truncated = True
                break
            if length > _MAX_FRAME_BYTES:
                raise MalformedMessage(f"a frame of {length} bytes")
            data = file.read(length)
            if len(data) < length:
                break
            frame = _decode_frame(data)
            if isinstance(frame, _Begin) != (rank is None):
                raise MalformedMessage("its first frame does not describe a rank, or a later one does")
            if isinstance(frame, _Begin):
                rank = checked(frame.rank)
            elif isinstance(frame, TracedGroup):
                groups[frame.ident] = frame
            elif isinstance(frame, _Lost):
                dropped += frame.operations
                truncated |= frame.rest
            elif len(frame.records) % _RECORD.size:
                raise MalformedMessage(f"operations of {len(frame.records)} bytes")
            else:
                operations.append(frame.records)
    if rank is None:
        raise MalformedMessage("it has no complete frame")
    return SpoolContents(rank, groups, operations, dropped, truncated)


def checked(rank: TracedRank) -> TracedRank:
    """Return ``rank`` if this release can read its trace; raise MalformedMessage otherwise."""
    if rank.schema != SCHEMA:
        raise MalformedMessage(f"this release of shoal cannot read {rank.schema!r}")
    return rank
