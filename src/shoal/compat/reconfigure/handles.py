"""The handles that processes exchange before ``torch.distributed._reconfigure``.

To torch and to its users a handle is an opaque string.  It says which process its owner is, so that the
others notice its death, and in which connections it is, so that all members of a list decide alike whether
they can use these again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec

from ...common.decoding import MalformedMessage, from_json
from ...errors import UsageError
from ...rendezvous.host import process_is_gone
from ...rendezvous.record import Process, Text

_PREFIX = "shoal:1:"
_GET_ONE = "torch.distributed._get_reconfigure_handle()"
_Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Ident = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
#: characters of a handle that an error message shows
_SHOWN = 60


class GroupHandle(msgspec.Struct, frozen=True):
    """One process group of one process.

    Attributes:
        ident: of the process group; no other one has it.
        first: the rank that the process gave to ``init_process_group``.
        machine, process: as of :class:`~shoal.rendezvous.host.Here`.
        world: identity of the connections that the process has; empty: it has none, or none to use again.
        place: the rank of the process in them.
        lost: ranks in them that the process has lost.
    """

    ident: _Ident
    first: _Rank
    machine: Text
    process: Process
    world: _Ident | None = None
    place: _Rank = 0
    lost: tuple[_Rank, ...] = ()

    def encode(self) -> str:
        """The string that torch hands out."""
        return _PREFIX + msgspec.json.encode(self).decode()

    def has_ended(self, machine: str) -> bool:
        """Whether the process has certainly ended, as seen from ``machine``."""
        return self.machine == machine and process_is_gone(self.process)

    def __str__(self) -> str:
        return f"process {self.process.split('/')[1]} on {self.machine.split('/')[0]}"


def members(given: object, mine: GroupHandle, world: str | None) -> tuple[GroupHandle, ...]:
    """The members of a new group, in the order of their ranks.

    Args:
        given: the list, whose order is that of the ranks, or the set of handles.  Members of a set are
            ordered by the ranks that they gave to ``init_process_group``, and by their identities.
        mine: a handle of this process.
        world: the connections that this process has.

    Raises:
        UsageError: it cannot be the list of a new group with this process.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Collection):
        raise UsageError(f"handles: expected a list or a set of str, got {type(given).__name__}")
    found = [_decoded(handle) for handle in given]
    if not isinstance(given, Sequence):
        found.sort(key=lambda each: (each.first, each.ident))
    if not found:
        raise UsageError("handles is empty: expected one for each member, this process's among them")
    idents = [each.ident for each in found]
    if twice := [each for each in found if idents.count(each.ident) > 1]:
        raise UsageError(f"handles has {len(twice)} handles of {twice[0]}: expected one for each member")
    own = next((each for each in found if each.ident == mine.ident), None)
    if own is None:
        raise UsageError(
            f"handles: the handle of this process ({mine}) is not among the {len(found)}; only members of "
            f"the new group call reconfigure, with what {_GET_ONE} returned to each"
        )
    if own.world not in (None, world):
        raise UsageError(
            f"handles: the handle of this process ({mine}) is from before its last reconfigure; call "
            f"{_GET_ONE} after each reconfigure, and exchange the handles again"
        )
    return tuple(found)


def _decoded(handle: object) -> GroupHandle:
    if not isinstance(handle, str):
        raise UsageError(f"handles: expected str, got {type(handle).__name__}")
    try:
        if handle.startswith(_PREFIX):
            return from_json(handle.removeprefix(_PREFIX).encode(), GroupHandle)
    except (MalformedMessage, UnicodeError):
        pass
    shown = handle if len(handle) <= _SHOWN else handle[:_SHOWN] + "..."
    raise UsageError(
        f"handles: {shown!r} is not a handle of a group over shoal; expected what {_GET_ONE} returned to "
        "each member, all of which use the backend shoal in the same release"
    )


def common_world(found: Sequence[GroupHandle]) -> str | None:
    """The connections that all of these processes are in and can use again; None: they have to connect.

    All members compute this from the same list, so their results are equal.
    """
    world = found[0].world
    if any(each.world != world for each in found):
        return None
    lost = {rank for each in found for rank in each.lost}
    return None if lost.intersection(each.place for each in found) else world


def digest(*parts: object) -> str:
    """An identity that follows from ``parts``: 16 hexadecimal digits."""
    return hashlib.blake2b(msgspec.json.encode([str(part) for part in parts]), digest_size=8).hexdigest()
