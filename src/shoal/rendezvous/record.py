"""The records that the ranks of a job write into the store when they meet, and their keys."""

from __future__ import annotations

from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec

from ..common.decoding import MalformedMessage, from_json
from ..errors import RendezvousError, RendezvousTimeout, StoreError
from ..net import build_version
from ..store import MemoryStore, PrefixStore, Store

#: version of the protocol of ``meeting``
PROTOCOL = 5

T = TypeVar("T")

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
#: identity of a process, as of ``host.Here``; the pattern keeps invalid process ids from the kernel
Process = Annotated[str, msgspec.Meta(pattern=r"^[^/]+/[1-9][0-9]{0,8}/[^/]+\Z", max_length=1000)]


class MeetingRecord(msgspec.Struct, frozen=True):
    """The values on which all members of a room must agree; ``fixed``: also in later rooms."""

    size: int
    protocol: int = PROTOCOL
    version: str = msgspec.field(default_factory=build_version)
    fixed: bool = False


class CalledOff(msgspec.Struct, frozen=True, tag=True):
    """Stored instead of a missing member: the process that serves the store has failed."""

    reason: str
    late: bool


class MeetingFailure(msgspec.Struct, frozen=True):
    """The reason of a failed meeting.

    Attributes:
        reason: for the other ranks.
        machine, at: where and when (as of :func:`host.now`) the member arrived that made the meeting fail.
            Processes that were running on that machine by then belong to the same start.
        ident: unique identity of the failure.
    """

    reason: str
    machine: str
    at: float
    ident: str


class MemberDescription(msgspec.Struct, frozen=True, tag=True):
    """A member's description for the others; ``at``: time of its arrival, as of :func:`host.now`."""

    host: str
    machine: str
    process: Process
    named: bool
    token: str
    left: bool = False
    at: float = 0.0

    def __str__(self) -> str:
        return f"process {self.process.split('/')[1]} on {self.machine.split('/')[0]}"


class Arrival(msgspec.Struct, frozen=True):
    """A process that is about to claim a rank, for the others on its machine."""

    process: Process
    token: str
    rank: int | None

    def __str__(self) -> str:
        rank = "a process without a rank" if self.rank is None else f"rank {self.rank}"
        return f"{rank} (process {self.process.split('/')[1]})"


class Exit(msgspec.Struct, frozen=True):
    """A launcher's report that the process of a rank has ended."""

    rank: int
    how: str


#: key of a launcher's reports, under the job's root
EXITS = "exits"

#: prefix, under the job's root, of the keys for joining a session (``elastic/membership/lobby.py``), and the
#: key below it with the number of ranks that a launcher wants
LOBBY, WANTED = "lobby", "wanted"

#: key of the number of the current room, under the job's root
ROOM = "room"


def job_record(size: int, job: str = "default", epoch: int = 0) -> dict[str, bytes]:
    """Return the keys for the starter of a job's store to set, so that ranks need not know the size.

    Args:
        size: number of ranks in the job.
        job, epoch: the ranks' ``SHOAL_JOB`` and ``SHOAL_EPOCH``.
    """
    with MemoryStore() as store:
        room = room_of(root_of(store, job, epoch), 0)
        room.set("record", msgspec.json.encode(MeetingRecord(size, fixed=True)))
        return {key: store.get(key) for key in store.list_keys()}


def note_exit(store: Store, rank: int, how: str, *, job: str, epoch: int = 0) -> None:
    """Report to present and future meetings that the process of a rank has ended; for launchers.

    Args:
        store: of the job.
        rank: the process's ``SHOAL_RANK``.
        how: the way it ended, for messages: ``exit code 0``.
        job, epoch: the ranks' ``SHOAL_JOB`` and ``SHOAL_EPOCH``.
    """
    root_of(store, job, epoch).append(EXITS, msgspec.json.encode(Exit(rank, how)) + b"\n")


def note_wanted(store: Store, size: int, *, job: str, epoch: int = 0) -> None:
    """Set the wanted number of ranks of a session, present or future; for launchers.

    Args:
        store, job, epoch: as of :func:`note_exit`.
        size: overrides ``SHOAL_SESSION_SIZE``.
    """
    PrefixStore(LOBBY, root_of(store, job, epoch)).set(WANTED, msgspec.json.encode(size))


def root_of(store: Store, job: str, epoch: int) -> Store:
    """Return the keys of one epoch of a job."""
    return PrefixStore(f"{quote(job, safe='')}/{epoch}", store)


def room_number(root: Store) -> int:
    """Return the number of the current room."""
    return root.add(ROOM, 0)


def room_of(root: Store, number: int) -> Store:
    """Return the keys of the room ``number``."""
    return PrefixStore(str(number), root)


def rank_key(rank: int) -> str:
    """Return the key of a rank's description in its room."""
    return f"rank/{rank}"


#: encodes the records of this module
encode = msgspec.json.Encoder().encode


def decode(raw: bytes, kind: type[T]) -> T:
    """Decode ``raw``, a record of type ``kind``. StoreError: another program uses the same keys."""
    try:
        return from_json(raw, kind)
    except MalformedMessage as error:
        raise StoreError(f"rendezvous: a {kind.__name__} in the store cannot be read: {error}") from error


def decode_number(raw: bytes | str) -> int:
    """Return the number in a counter, or at the end of a key; StoreError as of :func:`decode`."""
    if len(raw) > 20 or not (raw.isascii() and raw.isdigit()):
        raise StoreError(f"rendezvous: {raw[:40]!r} in the store is not a number")
    return int(raw)


def decode_member(raw: bytes) -> MemberDescription:
    """Decode a member; RendezvousError if the meeting was cancelled, StoreError as of :func:`decode`."""
    try:
        found: MemberDescription | CalledOff = from_json(raw, MemberDescription | CalledOff)  # type: ignore[arg-type]
    except MalformedMessage as error:
        raise StoreError(f"rendezvous: a member in the store cannot be read: {error}") from error
    if isinstance(found, CalledOff):
        raise (RendezvousTimeout if found.late else RendezvousError)(found.reason)
    return found
