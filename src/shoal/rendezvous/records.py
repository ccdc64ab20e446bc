"""The records that the ranks of a job write into the store to meet, and their keys.

When all members have arrived, one of them writes the *summary*, under two keys of the round::

    met               whether the round is complete or was cancelled
    met/<host>        the same for the ranks of a host (on one machine), with their list and the members on
                      the machine, so that each can detect dead ones when the store is lost

The ranks of a host wait for its key. Only the rank that finds all members present reads all descriptions: the
amount that the others read grows with the number of ranks on their host, not with the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import quote

import msgspec

from ..common.decoding import MalformedMessage, from_json
from ..common.process_identity import Process, ProcessIdentity
from ..errors import RendezvousError, RendezvousTimeout, StoreError, StoreTimeout
from ..net import build_version
from ..store import MemoryStore, PrefixStore, Store

#: version of the module ``protocol``
PROTOCOL = 5

T = TypeVar("T")

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class MeetingRecord(msgspec.Struct, frozen=True):
    """The values on which all members of a round must agree; ``fixed``: also in later rounds."""

    size: int
    protocol: int = PROTOCOL
    version: str = msgspec.field(default_factory=build_version)
    fixed: bool = False


class Cancelled(msgspec.Struct, frozen=True, tag="CalledOff"):
    """Stored instead of a missing member: the process that serves the store has failed."""

    reason: str
    late: bool


class MeetingFailure(msgspec.Struct, frozen=True):
    """The reason of a failed meeting.

    Attributes:
        reason: for the other ranks.
        machine, at: where and when (as of :func:`now`) the member arrived that made the meeting fail.
            Processes that were running on that machine by then belong to the same start.
        ident: unique identity of the failure.
    """

    reason: str
    machine: str
    at: float
    ident: str


class MemberDescription(ProcessIdentity, frozen=True, tag=True):
    """A member's description for the others; ``at``: time of its arrival, as of :func:`now`."""

    host: str
    named: bool
    token: str
    left: bool = False
    at: float = 0.0


class LocalProcess(msgspec.Struct, frozen=True):
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

#: prefix, under the job's keys, of the keys for joining a session (``elastic/membership/candidates.py``),
#: and the key below it with the number of ranks that a launcher wants
LOBBY, WANTED = "lobby", "wanted"

#: key of the number of the current round, under the job's root
ROUND = "room"


def job_record(size: int, job: str = "default", epoch: int = 0) -> dict[str, bytes]:
    """Return the keys for the starter of a job's store to set, so that ranks need not know the size.

    ``job`` and ``epoch`` are the ranks' ``SHOAL_JOB`` and ``SHOAL_EPOCH``.
    """
    with MemoryStore() as store:
        keys = round_keys(job_keys(store, job, epoch), 0)
        keys.set("record", msgspec.json.encode(MeetingRecord(size, fixed=True)))
        return {key: store.get(key) for key in store.list_keys()}


def report_exit(store: Store, rank: int, how: str, *, job: str, epoch: int = 0) -> None:
    """Report to present and future meetings that the process of a rank has ended; for launchers.

    Args:
        store: of the job.
        rank: the process's ``SHOAL_RANK``.
        how: the way it ended, for messages: ``exit code 0``.
        job, epoch: the ranks' ``SHOAL_JOB`` and ``SHOAL_EPOCH``.
    """
    job_keys(store, job, epoch).append(EXITS, msgspec.json.encode(Exit(rank, how)) + b"\n")


def set_wanted_size(store: Store, size: int, *, job: str, epoch: int = 0) -> None:
    """Set the wanted number of ranks of a session, present or future; for launchers.

    Args:
        store, job, epoch: as of :func:`report_exit`.
        size: overrides ``SHOAL_SESSION_SIZE``.
    """
    PrefixStore(LOBBY, job_keys(store, job, epoch)).set(WANTED, msgspec.json.encode(size))


def job_keys(store: Store, job: str, epoch: int) -> Store:
    """Return the keys of one epoch of a job."""
    return PrefixStore(f"{quote(job, safe='')}/{epoch}", store)


def round_keys(root: Store, number: int) -> Store:
    """Return the keys of the round ``number``."""
    return PrefixStore(str(number), root)


def rank_key(rank: int) -> str:
    """Return the key of a rank's description in its round."""
    return f"rank/{rank}"


#: encodes the records of this module
encode = msgspec.json.Encoder().encode


def decode(raw: bytes, kind: type[T], what: str = "") -> T:
    """Decode ``raw``, a record of type ``kind``. StoreError: another program uses the same keys.

    ``what``: its name for the message; "": that of ``kind``.
    """
    try:
        return from_json(raw, kind)
    except MalformedMessage as error:
        name = what or kind.__name__
        raise StoreError(f"rendezvous: a {name} in the store cannot be read: {error}") from error


def decode_number(raw: bytes | str) -> int:
    """Return the number in a counter, or at the end of a key; StoreError as of :func:`decode`."""
    if len(raw) > 20 or not (raw.isascii() and raw.isdigit()):
        raise StoreError(f"rendezvous: {raw[:40]!r} in the store is not a number")
    return int(raw)


def _unless_cancelled(raw: bytes, kind: type[T], what: str) -> T:
    """Like :func:`decode`, but raise RendezvousError if the meeting was cancelled."""
    either: Any = kind | Cancelled
    found = decode(raw, either, what)
    if isinstance(found, Cancelled):
        raise (RendezvousTimeout if found.late else RendezvousError)(found.reason)
    return cast(T, found)


def decode_member(raw: bytes) -> MemberDescription:
    """Decode a member; RendezvousError if the meeting was cancelled, StoreError as of :func:`decode`."""
    return _unless_cancelled(raw, MemberDescription, "member")


#: key that decides whether the meeting has succeeded or was cancelled
MET = "met"

#: maximum number of machines in :class:`Summary`
_MAX_MACHINES = 8


class LocalMember(msgspec.Struct, frozen=True, array_like=True):
    """A member, as described to the members on its machine."""

    rank: int
    process: Process
    at: float


class Summary(msgspec.Struct, frozen=True, tag="Met"):
    """All members have arrived.

    Attributes:
        machines: the first few machines that they run on, at least two if there are several.
        together: the ranks of one host.
        present: the members on one machine.
    """

    machines: list[str]
    together: list[int] = []
    present: list[LocalMember] = []


def publish_if_complete(keys: Store, size: int) -> None:
    """Notify the members that wait in ``keys`` if all have arrived; RendezvousError: it was cancelled."""
    try:
        members = [
            decode_member(raw) for raw in keys.multi_get([rank_key(rank) for rank in range(size)], 0.0)
        ]
    except StoreTimeout:
        return  # the count includes members that withdrew
    write_summary(keys, members)


def write_summary(keys: Store, members: Sequence[MemberDescription]) -> None:
    """Notify the members that wait in ``keys``; ``members`` in the order of ranks. Raises as above."""
    hosts: dict[str, list[int]] = {}
    machines: dict[str, list[LocalMember]] = {}
    for rank, each in enumerate(members):
        hosts.setdefault(each.host, []).append(rank)
        machines.setdefault(each.machine, []).append(LocalMember(rank, each.process, each.at))
    met = Summary(sorted(machines)[:_MAX_MACHINES])
    decode_met(keys.compare_set(MET, b"", msgspec.json.encode(met)))
    for host, machine in {(each.host, each.machine): None for each in members}:
        here = msgspec.structs.replace(met, together=hosts[host], present=machines[machine])
        keys.compare_set(host_key(host, machine), b"", msgspec.json.encode(here))


def cancel(keys: Store, notice: Cancelled, members: Iterable[MemberDescription]) -> None:
    """Notify these waiting members that the meeting is cancelled, unless all had arrived before."""
    raw = msgspec.json.encode(notice)
    if keys.compare_set(MET, b"", raw) == raw:
        for key in {host_key(each.host, each.machine) for each in members}:
            keys.compare_set(key, b"", raw)


def decode_met(raw: bytes) -> Summary:
    """Decode the value of :data:`MET`, or of a :func:`host_key`; raises as :func:`decode_member`."""
    return _unless_cancelled(raw, Summary, "summary")


def host_key(host: str, machine: str) -> str:
    """Return the key for which the ranks of ``host`` on ``machine`` wait."""
    return f"met/{hashlib.blake2b(msgspec.json.encode([host, machine]), digest_size=8).hexdigest()}"
