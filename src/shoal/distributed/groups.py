"""Ranks and sizes of groups, new groups, and conversion between global ranks and ranks in a group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import config
from ..backend.registry import NATIVE
from ..errors import UsageError
from ..group import ProcessGroup
from ..group.group_argument import NON_GROUP_MEMBER
from ..torch_terms.arguments import Duration, seconds
from .backend import parse_backend, refuse_device
from .state import GroupLike, default_group, is_non_member, own_group, state


def get_rank(group: GroupLike = None) -> int:
    """Return the rank of this process in a group; -1 if it is not a member."""
    return -1 if is_non_member(group) else own_group(group, "get_rank").rank


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of members of a group; -1 if this process is not a member."""
    return -1 if is_non_member(group) else own_group(group, "get_world_size").size


#: Torch's first name of :func:`get_world_size`.
get_num_processes = get_world_size


def get_process_group_ranks(group: GroupLike = None) -> list[int]:
    """Return the global ranks of the members of a group, in order of group rank."""
    return list(own_group(group, "get_process_group_ranks").ranks)


def get_group_rank(group: GroupLike, global_rank: int) -> int:
    """Return the rank in ``group`` of a global rank.

    Raises:
        UsageError: that rank is not a member.
    """
    return group_rank_of(own_group(group, "get_group_rank"), "get_group_rank", "global_rank", global_rank)


def get_global_rank(group: GroupLike, group_rank: int) -> int:
    """Return the global rank of a rank in ``group``.

    Raises:
        UsageError: the group has no such rank.
    """
    pg = own_group(group, "get_global_rank")
    if not isinstance(group_rank, int) or not 0 <= group_rank < pg.size:
        raise UsageError(
            f"get_global_rank on rank {pg.rank}: group_rank must be from 0 to {pg.size - 1}, "
            f"got {group_rank!r}"
        )
    return pg.ranks[group_rank]


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the rank of this process among the job's processes on this host.

    Sources, in this order: ``LOCAL_RANK``, ``SHOAL_LOCAL_RANK``, the default group, ``fallback_rank``.

    Raises:
        UsageError: none of them is available.
    """
    given = os.environ.get("LOCAL_RANK", "").strip()
    if given.isdecimal():
        return int(given)
    launched = config.LOCAL_RANK.get()
    if launched is not None:
        return launched
    if state.world is not None:
        return state.world.local_rank
    if fallback_rank is not None:
        return int(fallback_rank)
    raise UsageError(
        "get_node_local_rank: neither LOCAL_RANK nor SHOAL_LOCAL_RANK is set and there is no default group; "
        "call init_process_group() first, or pass fallback_rank"
    )


def get_pg_count() -> int:
    """Return the number of groups created so far, including the default group."""
    return state.groups


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Duration | None = None,
    backend: str | None = None,
    pg_options: Mapping[str, Any] | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Any:
    """Create a group of some ranks of the default group, independent of all other groups.

    As in torch, all ranks of the default group must call it in the same order; with
    ``use_local_synchronization=True`` only the members must.  It does not communicate, except as described
    for ``backend``.

    Args:
        ranks: global ranks; None: all.
        timeout: the default timeout of the new group's operations; None: that of the default group.
        backend: None: that of the default group.  With another one, or with ``pg_options`` that affect
            connections, the members connect to each other and the call waits for all of them.
        pg_options: further arguments of :meth:`shoal.ProcessGroup.subgroup`, such as ``{"concurrency": 2}``
            or ``{"transport": "tcp"}``, equal on all members.
        use_local_synchronization: True: return None on ranks that are not members.
        group_desc: part of the group's name.
        device_id: None, the CPU, or with ``"nccl"`` a CUDA device; not used.
        sort_ranks: whether group ranks follow global ranks; False: they follow the order of ``ranks``.

    Returns:
        A :class:`shoal.ProcessGroup` on members, ``GroupMember.NON_GROUP_MEMBER`` elsewhere.

    Raises:
        UsageError: there is no default group, or a rank is not in it or is given twice.
        UnsupportedOperation: shoal does not support the backend or device.
    """
    world = default_group("new_group")
    own = _subgroup_options("new_group", world, backend, pg_options)
    name = state.backend if backend is None else parse_backend(backend).backend
    refuse_device("new_group", device_id, name)
    members = list(range(world.size)) if ranks is None else list(ranks)
    _check_members("new_group", world, members)
    state.count()
    if world.rank not in members:
        return None if use_local_synchronization else NON_GROUP_MEMBER
    return world.subgroup(
        sorted(members) if sort_ranks else members, group_desc, timeout=seconds(timeout), **own
    )


def new_subgroups(
    group_size: int | None = None,
    group: GroupLike = None,
    timeout: Duration | None = None,
    backend: str | None = None,
    pg_options: Mapping[str, Any] | None = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Split a group into subgroups of ``group_size`` consecutive ranks.

    Args:
        group_size: must divide the size of ``group``.
        group: None: the default group.
        timeout, backend, pg_options, group_desc: as for :func:`new_group`.

    Returns:
        The group of this rank, and the results of :func:`new_group` for all groups.

    Raises:
        UsageError: ``group_size`` is missing or does not divide the size.
    """
    pg = own_group(group, "new_subgroups")
    if not isinstance(group_size, int) or group_size < 1 or pg.size % group_size:
        raise UsageError(
            f"new_subgroups on rank {pg.rank}: group_size must divide the size of the group, {pg.size}, "
            f"got {group_size!r}"
        )
    ranks = [list(pg.ranks[first : first + group_size]) for first in range(0, pg.size, group_size)]
    return new_subgroups_by_enumeration(ranks, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Duration | None = None,
    backend: str | None = None,
    pg_options: Mapping[str, Any] | None = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Create a group for each of several disjoint lists of global ranks.

    Returns:
        The group of this rank (None if in none), and the results of :func:`new_group` for all lists.

    Raises:
        UsageError: there is no list, or a rank is in two lists.
    """
    world = default_group("new_subgroups_by_enumeration")
    lists = [list(ranks) for ranks in ranks_per_subgroup_list or ()]
    if not lists:
        raise UsageError(
            f"new_subgroups_by_enumeration on rank {world.rank}: expected at least one list of ranks"
        )
    together = [rank for ranks in lists for rank in ranks]
    _check_members("new_subgroups_by_enumeration", world, together)
    made = [new_group(ranks, timeout, backend, pg_options, group_desc=group_desc) for ranks in lists]
    return next((pg for pg in made if not is_non_member(pg)), None), made


def split_group(
    parent_pg: GroupLike = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Duration | None = None,
    pg_options: Mapping[str, Any] | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group into groups of the listed ranks.

    Args:
        parent_pg: None: the default group.
        split_ranks: disjoint lists of ranks *in that group*.
        timeout, pg_options, group_desc, backend: as for :func:`new_group`.

    Returns:
        The group of this rank, ordered by the ranks in the parent; None if this rank is in no list.

    Raises:
        UsageError: there is no list, or a rank is not in the group or is in two lists.
    """
    parent = own_group(parent_pg, "split_group")
    own = _subgroup_options("split_group", parent, backend, pg_options)
    lists = [list(ranks) for ranks in split_ranks or ()]
    if not lists or not all(lists):
        raise UsageError(
            f"split_group on rank {parent.rank}: split_ranks must be non-empty lists of ranks, "
            f"got {split_ranks!r}"
        )
    _check_members("split_group", parent, [rank for ranks in lists for rank in ranks])
    state.count()
    mine = next((ranks for ranks in lists if parent.rank in ranks), None)
    if mine is None:
        return None
    return parent.subgroup(sorted(mine), group_desc or "split", timeout=seconds(timeout), **own)


def _check_members(operation: str, pg: ProcessGroup, ranks: Sequence[int]) -> None:
    for rank in ranks:
        if not isinstance(rank, int) or not 0 <= rank < pg.size:
            raise UsageError(
                f"{operation} on rank {pg.rank}: ranks must be from 0 to {pg.size - 1}, got {rank!r}"
            )
    if len(set(ranks)) != len(ranks):
        raise UsageError(f"{operation} on rank {pg.rank}: a rank is listed twice in {list(ranks)}")


def _subgroup_options(
    operation: str, pg: ProcessGroup, backend: str | None, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of ``subgroup`` that the new group does not inherit from its parent."""
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(
            f"{operation} on rank {pg.rank}: pg_options={options!r}: expected a dict of arguments of "
            'subgroup, such as {"concurrency": 2} or {"transport": "tcp"}'
        )
    own = dict(options or {})
    if backend is not None:
        engine, default = parse_backend(backend), parse_backend(state.backend)
        if engine.backend != default.backend:
            own["backend"] = engine.backend
        if engine.backend == NATIVE and engine.transport != default.transport:
            own.setdefault("transport", engine.transport or config.TRANSPORT.get())
    return own


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
