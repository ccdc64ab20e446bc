"""Messages between two ranks, with torch's names, arguments and global ranks.

``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks in the group.  Messages are
matched by sender and tag, in the order of sending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from ..errors import UsageError
from ..spec import ANY_SOURCE
from .groups import rank_in_group
from .state import GroupLike, default_group, is_non_member, member_group
from .work import Work


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Send ``tensor`` to another rank; do not change it before the work is complete.

    Args:
        tag: 0 to 2**30 - 1; the receiver must pass the same.

    Returns:
        A work; None, with a warning, on a rank outside the group.
    """
    if (pg := member_group(group, "isend")) is None:
        return None
    peer = rank_in_group(pg, "isend", "dst", dst, group_dst)
    return Work(pg.send(tensor, peer, tag), ())


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Receive into ``tensor`` from ``src``; without a source, from any rank.

    Returns:
        A work (``source_rank`` is the sender); None, with a warning, on a rank outside the group.
    """
    if (pg := member_group(group, "irecv")) is None:
        return None
    if src is None and group_src is None:
        return Work(pg.recv_message(tensor, ANY_SOURCE, tag), (tensor,))
    peer = rank_in_group(pg, "irecv", "src", src, group_src)
    return Work(pg.recv(tensor, peer, tag), (tensor,), peer)


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor`` and wait until it may be changed, which does not mean that it was received."""
    work = isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


@overload
def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int: ...


@overload
def recv(tensor: int, src: None = None, group: GroupLike = None, tag: int = 0) -> torch.Tensor: ...


def recv(
    tensor: torch.Tensor | int,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int | torch.Tensor | None:
    """Receive into ``tensor``, as :func:`irecv`, and wait.

    Args:
        tensor: the output; or, as in the first draft of torch.distributed, the global rank of the sender:
            ``tensor = recv(0)`` receives a tensor of any shape and dtype from rank 0.

    Returns:
        The global rank of the sender; -1, with a warning, on a rank outside the group.  Without an output
        tensor: the received tensor, or None on such a rank.
    """
    pg = member_group(group, "recv")
    if isinstance(tensor, int):
        if src is not None or group_src is not None:
            raise UsageError(
                f"recv: the first argument, {tensor!r}, is an int and therefore the sender's rank, but "
                f"src={src!r} and group_src={group_src!r} are given too"
            )
        return (
            None if pg is None else pg.recv(None, rank_in_group(pg, "recv", "src", tensor, None), tag).wait()
        )
    if pg is None:
        return -1
    work = irecv(tensor, src, pg, tag, group_src)
    assert work is not None  # this rank is in the group
    work.wait()
    return pg.ranks[work.source_rank()]


class P2POp:
    """One message of a :func:`batch_isend_irecv`.

    Args:
        op: :func:`isend` or :func:`irecv`.
        tensor: the tensor to send, or to receive into.
        peer: the global rank of the peer.
        group: None: the default group.
        tag: as for ``op``.
        group_peer: the rank of the peer in the group, instead of ``peer``.

    Raises:
        UsageError: ``op`` is another function, or there is no such rank.
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        world = default_group("P2POp")
        if op is not isend and op is not irecv:
            raise UsageError(
                f"P2POp on rank {world.rank}: op must be isend or irecv of shoal.distributed, got {op!r}"
            )
        self.op = op
        self.tensor = tensor
        self.tag = tag
        self.group: GroupLike = world if group is None else group
        if is_non_member(group):
            self.peer, self.group_peer = -1, -1
            return
        pg = member_group(group, "P2POp")
        assert pg is not None  # this rank is in the group
        self.group = pg
        self.group_peer = rank_in_group(pg, "P2POp", "peer", peer, group_peer)
        self.peer = pg.ranks[self.group_peer]

    def __repr__(self) -> str:
        return (
            f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag}, {self.tensor.dtype}, "
            f"{tuple(self.tensor.shape)})"
        )


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Submit several messages together; the relative order of sends and receives does not matter.

    Returns:
        One work per message; an empty list, with a warning, on a rank outside the group.

    Raises:
        UsageError: an element is not a :class:`P2POp`, or the elements are for different groups.
    """
    if not isinstance(p2p_op_list, Sequence) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise UsageError(f"batch_isend_irecv: expected a list of P2POp, got {p2p_op_list!r}")
    if not p2p_op_list:
        return []
    group = p2p_op_list[0].group
    if any(op.group is not group for op in p2p_op_list):
        raise UsageError("batch_isend_irecv: all messages of a batch must be for the same group")
    if (pg := member_group(group, "batch_isend_irecv")) is None:
        return []
    with pg.batch() as batch:
        for op in p2p_op_list:
            add = batch.send if op.op is isend else batch.recv
            add(op.tensor, op.group_peer, op.tag)
    return [
        Work(future, ()) if op.op is isend else Work(future, (op.tensor,), op.group_peer)
        for op, future in zip(p2p_op_list, batch.futures, strict=True)
    ]
