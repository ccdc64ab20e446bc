"""What ended a group without any call that raised it, for the end of the group's block."""

from __future__ import annotations

from ..backend.base import Backend
from ..errors import GroupError, PeerLost
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
