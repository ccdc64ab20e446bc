"""The end of a group's ``with`` block: an abort after an exception, and failures that no call has raised."""

from __future__ import annotations

from ..backend.base import Backend
from ..errors import GroupError, PeerLost
from ..wording import shown
from .watched import Watched


def unseen_failure(group: Watched, backend: Backend) -> GroupError | None:
    """The failure of an open group if no call has raised it.

    A lost rank is reported once, by whichever group of the world meets it; where an agent uses the world, the
    agent's calls report it.
    """
    if group.state not in ("broken", "aborted") or group._channel.reported:
        return None
    failure = group._channel.failure()
    known = group._world.losses_reported or backend.losses_reported
    return None if isinstance(failure, PeerLost) and known else failure


def abort_after(error: BaseException, group: Watched, *, whole_world: bool) -> None:
    """Abort ``group``, whose block this exception leaves.

    Args:
        whole_world: whether it is the group of all ranks: then all connections are closed too.
    """
    reason = f"an exception left the group's block on rank {group.rank}: {shown(error)}"
    if whole_world:
        try:
            group._world.abort(reason)
        finally:
            group._world.close(group.timeout)
    group.abort(reason)
