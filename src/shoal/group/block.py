"""The end of a group's ``with`` block: the abort after an exception, and failures that no call has raised."""

from __future__ import annotations

from ..common.formatting import error_repr
from ..errors import CollectiveMismatch, GroupError, PeerLost
from .diagnostics.watched import Watched


def end_block(
    group: Watched, error: BaseException | None, may_abort: bool, *, is_first: bool, goes_on: bool
) -> None:
    """Close ``group`` at the end of its block.

    Args:
        error: the exception that leaves the block.
        may_abort: whether the group is neither closed nor aborted.
        is_first: whether it is the group of all ranks: then an exception ends all groups and connections.
        goes_on: whether a rebuild has replaced the group, so that the new group reports the failure.

    Raises:
        GroupError: the failure of the group, also one detected on closing, if no call has raised it and no
            exception leaves the block.
    """
    orderly = error is None or (isinstance(error, SystemExit) and not error.code)
    unseen = _unseen_failure(group) if error is None and not goes_on else None
    try:
        if error is not None and not orderly and may_abort:
            _abort_after(error, group, whole_world=is_first)
        group.close()
    except CollectiveMismatch:
        if orderly:
            raise
    if unseen is not None:
        raise group._reported(unseen)


def _unseen_failure(group: Watched) -> GroupError | None:
    """Return the failure of an open group if no call has raised it.

    A lost rank is reported once, by the first group of the world that detects it, or by calls of an RPC agent
    that uses the world.
    """
    if group.state not in ("broken", "aborted") or group._channel.reported:
        return None
    failure = group._channel.failure()
    known = group._world.losses_reported or group._backend.losses_reported
    return None if isinstance(failure, PeerLost) and known else failure


def _abort_after(error: BaseException, group: Watched, *, whole_world: bool) -> None:
    reason = f"an exception left the group's block on rank {group.rank}: {error_repr(error)}"
    if whole_world:
        try:
            group._world.abort(reason)
        finally:
            group._world.close(group.timeout)
    group.abort(reason)
