"""The summary of a complete meeting, written when all members have arrived, and short to read.

Keys of the room::

    met               whether the meeting has succeeded or was cancelled
    met/<host>        the same for the ranks of a host (on one machine), with their list and the members on
                      the machine, so that each can detect dead ones when the store is lost

The ranks of a host wait for its key. Only the rank that finds all members present reads all descriptions: the
amount that the others read grows with the number of ranks on their host, not with the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from ..errors import RendezvousError, RendezvousTimeout, StoreTimeout
from ..store import Store
from .record import CalledOff, MemberDescription, Process, decode, decode_member, rank_key

#: key that decides whether the meeting has succeeded or was cancelled
MET = "met"

#: maximum number of machines in :class:`Met`
_MAX_MACHINES = 8


class Present(msgspec.Struct, frozen=True, array_like=True):
    """A member, as described to the members on its machine."""

    rank: int
    process: Process
    at: float


class Met(msgspec.Struct, frozen=True, tag=True):
    """All members have arrived.

    Attributes:
        machines: the first few machines that they run on, at least two if there are several.
        together: the ranks of one host.
        present: the members on one machine.
    """

    machines: list[str]
    together: list[int] = []
    present: list[Present] = []


def tell_if_all_came(room: Store, size: int) -> None:
    """Notify the members that wait in ``room`` if all have arrived; RendezvousError: it was cancelled."""
    try:
        members = [
            decode_member(raw) for raw in room.multi_get([rank_key(rank) for rank in range(size)], 0.0)
        ]
    except StoreTimeout:
        return  # the count includes members that withdrew
    write_summary(room, members)


def write_summary(room: Store, members: Sequence[MemberDescription]) -> None:
    """Notify the members that wait in ``room``; ``members`` in the order of ranks. Raises as above."""
    hosts: dict[str, list[int]] = {}
    machines: dict[str, list[Present]] = {}
    for rank, each in enumerate(members):
        hosts.setdefault(each.host, []).append(rank)
        machines.setdefault(each.machine, []).append(Present(rank, each.process, each.at))
    met = Met(sorted(machines)[:_MAX_MACHINES])
    decode_met(room.compare_set(MET, b"", msgspec.json.encode(met)))
    for host, machine in {(each.host, each.machine): None for each in members}:
        here = msgspec.structs.replace(met, together=hosts[host], present=machines[machine])
        room.compare_set(host_key(host, machine), b"", msgspec.json.encode(here))


def call_off(room: Store, notice: CalledOff, members: Iterable[MemberDescription]) -> None:
    """Notify these waiting members that the meeting is cancelled, unless all had arrived before."""
    raw = msgspec.json.encode(notice)
    if room.compare_set(MET, b"", raw) == raw:
        for key in {host_key(each.host, each.machine) for each in members}:
            room.compare_set(key, b"", raw)


def decode_met(raw: bytes) -> Met:
    """Decode the value of :data:`MET`, or of a :func:`host_key`; RendezvousError: it was cancelled."""
    found: Met | CalledOff = decode(raw, Met | CalledOff)  # type: ignore[arg-type]
    if isinstance(found, CalledOff):
        raise (RendezvousTimeout if found.late else RendezvousError)(found.reason)
    return found


def host_key(host: str, machine: str) -> str:
    """Return the key for which the ranks of ``host`` on ``machine`` wait."""
    return f"met/{hashlib.blake2b(msgspec.json.encode([host, machine]), digest_size=8).hexdigest()}"
