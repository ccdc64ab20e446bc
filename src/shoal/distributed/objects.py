"""Collectives and messages of picklable Python objects, with torch's names, arguments and global ranks.

They block, and store results in lists of the caller.  ``device`` and ``use_batch`` are ignored.  On a rank
outside the group they warn and do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..common.formatting import counted
from ..errors import UsageError
from ..group import ProcessGroup
from ..group.objects import received
from ..spec import ANY_SOURCE
from .groups import rank_in_group
from .state import GroupLike, member_group


def all_gather_object(object_list: list[Any], obj: Any, group: GroupLike = None) -> None:
    """Gather ``obj`` of rank *r* into ``object_list[r]`` on all ranks."""
    if (pg := member_group(group, "all_gather_object")) is None:
        return
    _check_length(pg, "all_gather_object", "object_list", object_list)
    object_list[: pg.size] = pg.all_gather_object(obj).wait()


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    group_dst: int | None = None,
) -> None:
    """Gather ``obj`` of rank *r* into ``object_gather_list[r]`` of the destination (default 0; else None)."""
    if (pg := member_group(group, "gather_object")) is None:
        return
    root = rank_in_group(pg, "gather_object", "dst", dst, group_dst, default=0)
    if pg.rank == root:
        _check_length(pg, "gather_object", "object_gather_list", object_gather_list)
    elif object_gather_list:
        raise UsageError(f"gather_object on rank {pg.rank}: only the destination, rank {root}, passes a list")
    objects = pg.gather_object(obj, root).wait()
    if objects is not None and object_gather_list is not None:
        object_gather_list[: pg.size] = objects


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Copy the objects of the source (default: rank 0) to all ranks; all lists must be equally long."""
    if (pg := member_group(group, "broadcast_object_list")) is None:
        return
    root = rank_in_group(pg, "broadcast_object_list", "src", src, group_src, default=0)
    _check_list(pg, "broadcast_object_list", object_list)
    objects = pg.broadcast_object(object_list, root).wait()
    if pg.rank != root:
        _fill(pg, "broadcast_object_list", object_list, objects)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
) -> None:
    """Send element *r* of the source's list (default: rank 0) to rank *r*, as element 0 of its list."""
    if (pg := member_group(group, "scatter_object_list")) is None:
        return
    root = rank_in_group(pg, "scatter_object_list", "src", src, group_src, default=0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise UsageError(
            f"scatter_object_list on rank {pg.rank}: scatter_object_output_list must be a non-empty list, "
            f"got {scatter_object_output_list!r}"
        )
    inputs = scatter_object_input_list if pg.rank == root else None
    scatter_object_output_list[0] = pg.scatter_object(inputs, root).wait()


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send several objects to one rank, which calls :func:`recv_object_list` with an equally long list."""
    if (pg := member_group(group, "send_object_list")) is None:
        return
    peer = rank_in_group(pg, "send_object_list", "dst", dst, group_dst)
    _check_list(pg, "send_object_list", object_list)
    pg.send_object(list(object_list), peer).wait()


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects from :func:`send_object_list`; without a source, from any rank.

    Returns:
        The global rank of the sender; -1, with a warning, on a rank outside the group.
    """
    if (pg := member_group(group, "recv_object_list")) is None:
        return -1
    _check_list(pg, "recv_object_list", object_list)
    peer = ANY_SOURCE
    if src is not None or group_src is not None:
        peer = rank_in_group(pg, "recv_object_list", "src", src, group_src)
    message = pg.recv_message(None, peer).wait()
    _fill(pg, "recv_object_list", object_list, received(message.tensor, pg.rank))
    return pg.ranks[message.source]


def _check_length(pg: ProcessGroup, operation: str, what: str, given: Sequence[Any] | None) -> None:
    if not isinstance(given, list) or len(given) < pg.size:
        length = counted(len(given), "element") if isinstance(given, list) else repr(given)
        raise UsageError(
            f"{operation} on rank {pg.rank}: {what} must be a list with one element for each of "
            f"{counted(pg.size, 'rank')}, "
            f"got {length}"
        )


def _check_list(pg: ProcessGroup, operation: str, given: object) -> None:
    if not isinstance(given, list):
        raise UsageError(f"{operation} on rank {pg.rank}: object_list must be a list, got {given!r}")


def _fill(pg: ProcessGroup, operation: str, places: list[Any], objects: object) -> None:
    if not isinstance(objects, list) or len(objects) != len(places):
        sent = f"{len(objects)} objects" if isinstance(objects, list) else f"a {type(objects).__name__}"
        raise UsageError(
            f"{operation} on rank {pg.rank}: object_list has {len(places)} elements, but the sender "
            f"sent {sent}"
        )
    places[:] = objects
