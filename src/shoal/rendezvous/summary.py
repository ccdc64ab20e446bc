"""What the members of a room need to know of each other: written when all have come, short to read.

Under the room's keys::

    met               decides that the meeting has succeeded, or was called off
    met/<host>        the same for the ranks of a host (on one machine), and which they are; also the members
                      on the machine, so that each can see who of its own is dead when the store is gone

The ranks of a host wait for its key.  Whoever finds that all have come reads all descriptors, and nobody else
does: what a rank reads grows with its host's ranks and not with the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from ..errors import RendezvousError, RendezvousTimeout, StoreTimeout
from ..store import Store
from .record import CalledOff, MemberDescription, Process, decode, decode_member, rank_key

#: what decides whether the meeting has succeeded or was called off
MET = "met"

#: machines that :class:`Met` names
_NAMED = 8


class Present(msgspec.Struct, frozen=True, array_like=True):
    """A member, for those on its machine."""

    rank: int
    process: Process
    at: float


class Met(msgspec.Struct, frozen=True, tag=True):
    """All have come.

    Attributes:
        machines: the first few of those that they run on, two if there is more than one.
        together: the ranks of one host.
        present: the members on one machine.
    """

    machines: list[str]
    together: list[int] = []
    present: list[Present] = []


def tell_if_all_came(room: Store, size: int) -> None:
    """Tell those who wait in ``room`` that all have come, if that is so.

    Raises:
        RendezvousError: the meeting was called off.
    """
    try:
        members = [
            decode_member(raw) for raw in room.multi_get([rank_key(rank) for rank in range(size)], 0.0)
        ]
    except StoreTimeout:
        return  # who gave up was counted too
    write_summary(room, members)


def write_summary(room: Store, members: Sequence[MemberDescription]) -> None:
    """Tell those who wait in ``room`` that these have come, in the order of their ranks.  Raises as above."""
    hosts: dict[str, list[int]] = {}
    machines: dict[str, list[Present]] = {}
    for rank, each in enumerate(members):
        hosts.setdefault(each.host, []).append(rank)
        machines.setdefault(each.machine, []).append(Present(rank, each.process, each.at))
    met = Met(sorted(machines)[:_NAMED])
    decode_met(room.compare_set(MET, b"", msgspec.json.encode(met)))
    for host, machine in {(each.host, each.machine): None for each in members}:
        here = msgspec.structs.replace(met, together=hosts[host], present=machines[machine])
        room.compare_set(host_key(host, machine), b"", msgspec.json.encode(here))


def call_off(room: Store, notice: CalledOff, members: Iterable[MemberDescription]) -> None:
    """Tell these members, who wait, unless all had come before."""
    raw = msgspec.json.encode(notice)
    if room.compare_set(MET, b"", raw) == raw:
        for key in {host_key(each.host, each.machine) for each in members}:
            room.compare_set(key, b"", raw)


def decode_met(raw: bytes) -> Met:
    """What stands under :data:`MET`, or under a :func:`host_key`.

    Raises:
        RendezvousError: the meeting was called off.
        StoreError: it cannot be read.
    """
    found: Met | CalledOff = decode(raw, Met | CalledOff)  # type: ignore[arg-type]
    if isinstance(found, CalledOff):
        raise (RendezvousTimeout if found.late else RendezvousError)(found.reason)
    return found


def host_key(host: str, machine: str) -> str:
    """What the ranks of ``host`` on ``machine`` wait for."""
    return f"met/{hashlib.blake2b(msgspec.json.encode([host, machine]), digest_size=8).hexdigest()}"
