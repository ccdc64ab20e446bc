"""The records that the ranks of a job write into the store when they meet, and their keys."""

from __future__ import annotations

from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec

from ..common.decoding import MalformedMessage, from_json
from ..errors import RendezvousError, RendezvousTimeout, StoreError
from ..net import build_version
from ..store import MemoryStore, PrefixStore, Store

#: counts up when the protocol of ``meeting`` changes
PROTOCOL = 5

T = TypeVar("T")

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
#: identity of a process, as of ``host.Here``: a number that is no process id must not get to the kernel
Process = Annotated[str, msgspec.Meta(pattern=r"^[^/]+/[1-9][0-9]{0,8}/[^/]+\Z", max_length=1000)]


class MeetingRecord(msgspec.Struct, frozen=True):
    """All members of a room must agree on it; ``fixed``: it also holds for the rooms to come."""

    size: int
    protocol: int = PROTOCOL
    version: str = msgspec.field(default_factory=build_version)
    fixed: bool = False


class CalledOff(msgspec.Struct, frozen=True, tag=True):
    """Stands in the place of members that have not come: who serves the store gives up."""

    reason: str
    late: bool


class MeetingFailure(msgspec.Struct, frozen=True):
    """Why a meeting failed.

    Attributes:
        reason: for the others.
        machine, at: where, and when (see :func:`host.now`), the member came that made it fail.  Processes
            that were running there by then were started together with it.
        ident: tells failures apart.
    """

    reason: str
    machine: str
    at: float
    ident: str


class MemberDescription(msgspec.Struct, frozen=True, tag=True):
    """A member's description of itself for the others; ``at`` is when it came, as of :func:`host.now`."""

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
    """A process that is about to claim a rank, as the others on its machine are told."""

    process: Process
    token: str
    rank: int | None

    def __str__(self) -> str:
        rank = "a process without a rank" if self.rank is None else f"rank {self.rank}"
        return f"{rank} (process {self.process.split('/')[1]})"


class Exit(msgspec.Struct, frozen=True):
    """A launcher's word on a rank whose process has ended."""

    rank: int
    how: str


#: where a launcher says so, under the job's root
EXITS = "exits"

#: where those wait that join a session (elastic/membership/lobby.py), under the job's root
#: and where a launcher says there how many ranks the session shall have
LOBBY, WANTED = "lobby", "wanted"

#: where the number of the current room stands, under the job's root
ROOM = "room"


def job_record(size: int, job: str = "default", epoch: int = 0) -> dict[str, bytes]:
    """The keys that whoever starts a job's store sets in it, so that ranks need not know the size.

    Args:
        size: number of ranks in the job.
        job, epoch: as the ranks find them in ``SHOAL_JOB`` and ``SHOAL_EPOCH``.
    """
    with MemoryStore() as store:
        room = room_of(root_of(store, job, epoch), 0)
        room.set("record", msgspec.json.encode(MeetingRecord(size, fixed=True)))
        return {key: store.get(key) for key in store.list_keys()}


def note_exit(store: Store, rank: int, how: str, *, job: str, epoch: int = 0) -> None:
    """Tell those that meet, now and later, that the process of a rank has ended; for launchers.

    Args:
        store: of the job.
        rank: as the process found it in ``SHOAL_RANK``.
        how: it ended, in words: ``exit code 0``.
        job, epoch: as the ranks find them in ``SHOAL_JOB`` and ``SHOAL_EPOCH``.
    """
    root_of(store, job, epoch).append(EXITS, msgspec.json.encode(Exit(rank, how)) + b"\n")


def note_wanted(store: Store, size: int, *, job: str, epoch: int = 0) -> None:
    """Tell a session, now or later, how many ranks it shall have; for launchers.

    Args:
        store, job, epoch: as of :func:`note_exit`.
        size: takes the place of ``SHOAL_SESSION_SIZE``.
    """
    PrefixStore(LOBBY, root_of(store, job, epoch)).set(WANTED, msgspec.json.encode(size))


def root_of(store: Store, job: str, epoch: int) -> Store:
    """The keys of one epoch of a job."""
    return PrefixStore(f"{quote(job, safe='')}/{epoch}", store)


def room_number(root: Store) -> int:
    """The number of the current room."""
    return root.add(ROOM, 0)


def room_of(root: Store, number: int) -> Store:
    """The keys of one world group of it."""
    return PrefixStore(str(number), root)


def rank_key(rank: int) -> str:
    """The key of a rank's descriptor in its room."""
    return f"rank/{rank}"


#: turns what stands here into bytes
encode = msgspec.json.Encoder().encode


def decode(raw: bytes, kind: type[T]) -> T:
    """The :class:`MeetingRecord` (or what else) that ``raw`` holds.

    Raises:
        StoreError: it holds something else; another program uses the same keys.
    """
    try:
        return from_json(raw, kind)
    except MalformedMessage as error:
        raise StoreError(f"rendezvous: a {kind.__name__} in the store cannot be read: {error}") from error


def decode_number(raw: bytes | str) -> int:
    """The number that a counter, or the end of a key, holds.

    Raises:
        StoreError: as of :func:`decode`.
    """
    if len(raw) > 20 or not (raw.isascii() and raw.isdigit()):
        raise StoreError(f"rendezvous: {raw[:40]!r} in the store is no number")
    return int(raw)


def decode_member(raw: bytes) -> MemberDescription:
    """The member that ``raw`` describes.

    Raises:
        RendezvousError: the meeting was called off.
        StoreError: as of :func:`decode`.
    """
    try:
        found: MemberDescription | CalledOff = from_json(raw, MemberDescription | CalledOff)  # type: ignore[arg-type]
    except MalformedMessage as error:
        raise StoreError(f"rendezvous: a member in the store cannot be read: {error}") from error
    if isinstance(found, CalledOff):
        raise (RendezvousTimeout if found.late else RendezvousError)(found.reason)
    return found
