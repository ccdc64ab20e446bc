"""Conversion of global ranks, as torch's functions take them, to ranks in a group."""

from __future__ import annotations

from ..errors import UsageError
from ..group import ProcessGroup


def rank_in_group(
    pg: ProcessGroup,
    operation: str,
    what: str,
    global_rank: int | None,
    group_rank: int | None,
    default: int | None = None,
) -> int:
    """Return the rank in ``pg`` that a caller gave as a global rank or as a rank in the group.

    Args:
        operation, what: names of the function and of its argument for a global rank, for errors.
        default: the global rank if neither is given.

    Raises:
        UsageError: both are given, neither is given, or the group has no such rank.
    """
    if group_rank is not None:
        if global_rank is not None:
            raise UsageError(
                f"{operation} on rank {pg.rank}: pass {what} (a global rank) or group_{what}, "
                f"not both; got {what}={global_rank!r} and group_{what}={group_rank!r}"
            )
        if not isinstance(group_rank, int) or not 0 <= group_rank < pg.size:
            raise UsageError(
                f"{operation} on rank {pg.rank}: group_{what} must be a rank in the group, from 0 to "
                f"{pg.size - 1}, got {group_rank!r}"
            )
        return group_rank
    if global_rank is None:
        if default is None:
            raise UsageError(
                f"{operation} on rank {pg.rank}: {what} (a global rank) or group_{what} must be given"
            )
        global_rank = default
    return group_rank_of(pg, operation, what, global_rank)


def group_rank_of(pg: ProcessGroup, operation: str, what: str, global_rank: int) -> int:
    """Return the rank in ``pg`` of a global rank.

    Raises:
        UsageError: that rank is not in the group.
    """
    try:
        return pg.ranks.index(global_rank)
    except ValueError:
        raise UsageError(
            f"{operation} on rank {pg.rank}: {what}={global_rank!r} is not among the group's global ranks, "
            f"{list(pg.ranks)}"
        ) from None
