"""The handles that processes exchange before ``torch.distributed._reconfigure``.

For torch and its users a handle is an opaque string.  It identifies a process, so that the other members
detect its failure, and its connections, so that all members of a list agree on whether to reuse them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec

from ...common.decoding import MalformedMessage, from_json
from ...common.process_identity import ProcessIdentity
from ...errors import UsageError

_PREFIX = "shoal:1:"
_GET_ONE = "torch.distributed._get_reconfigure_handle()"
_Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Ident = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
#: number of characters of a handle in an error message
_SHOWN = 60


class GroupHandle(ProcessIdentity, frozen=True):
    """One process group of one process."""

    ident: _Ident  # unique identifier of the process group
    first: _Rank  # the rank that the process passed to ``init_process_group``
    world: _Ident | None = None  # identifies the reusable connections of the process; None: it has none
    place: _Rank = 0  # the rank of the process in these connections
    lost: tuple[_Rank, ...] = ()  # the ranks in these connections that the process has lost

    def encode(self) -> str:
        """Return the string that torch passes to users."""
        return _PREFIX + msgspec.json.encode(self).decode()


def members(given: object, mine: GroupHandle, world: str | None) -> tuple[GroupHandle, ...]:
    """Return the members of a new group, ordered by rank.

    Args:
        given: a list of handles ordered by rank, or a set of handles.  The members of a set are ordered by
            the ranks that they passed to ``init_process_group``, and then by identifier.
        mine: a handle of this process.
        world: identifies this process's connections.

    Raises UsageError if ``given`` is not a valid list for a new group with this process.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Collection):
        raise UsageError(f"handles: expected a list or a set of str, got {type(given).__name__}")
    found = [_decoded(handle) for handle in given]
    if not isinstance(given, Sequence):
        found.sort(key=lambda each: (each.first, each.ident))
    if not found:
        raise UsageError("handles is empty: expected one for each member, including this process")
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
            f"handles: the handle of this process ({mine}) is older than its last reconfigure; call "
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
        f"handles: {shown!r} is not a handle of a shoal group; expected the results of {_GET_ONE} of "
        "all members, which must use the backend shoal in the same release"
    )


def common_world(found: Sequence[GroupHandle]) -> str | None:
    """Return the connections that all of these processes share and can reuse; None: they must connect.

    All members compute this from the same list and therefore get the same result.
    """
    world = found[0].world
    if any(each.world != world for each in found):
        return None
    lost = {rank for each in found for rank in each.lost}
    return None if lost.intersection(each.place for each in found) else world


def digest(*parts: object) -> str:
    """Return an identifier derived from ``parts``: 16 hexadecimal digits."""
    return hashlib.blake2b(msgspec.json.encode([str(part) for part in parts]), digest_size=8).hexdigest()
