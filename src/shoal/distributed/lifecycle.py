"""The beginning and the end of the default group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import UsageError
from ..initialize import init
from ..torch_terms.durations import CLOSING, Duration, seconds
from .backend import parse_backend, refuse_device
from .init_method import meeting_place
from .state import GroupLike, default_group, is_absent, member_group, state


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Duration | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: object = None,
    group_name: str = "",
    pg_options: Mapping[str, Any] | None = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Meet the other processes of the job and make the default group of them.

    Every process calls it; it returns when all have come and are connected.  Without a launcher and without
    arguments it is a group of one.

    Args:
        backend: None, ``"shoal"``, ``"gloo"`` and ``"cpu:gloo"`` mean the native engine; ``"tcp"`` means it
            without shared memory; or a name given to :func:`shoal.register_backend`.
        init_method: where to meet: ``env://`` (None), ``tcp://host:port``, ``file:///path``, or another URL
            of :func:`shoal.init`.  With ``env://``, launchers' variables are read, and those that
            scripts set themselves: MASTER_ADDR and MASTER_PORT, with RANK and WORLD_SIZE or arguments.
        timeout: until all must have come, and the default of operations: a timedelta, or seconds; None:
            ``SHOAL_TIMEOUT`` (300 s).
        world_size, rank: -1: as the launcher says, else in order of arrival.
        store: a store to meet in, instead of ``init_method``; rank and size must be given too.  It is one of
            ours or of ``torch.distributed``, the same one for all.  It stays the caller's, and must serve
            until the default group is destroyed.
        group_name: not used, as in torch.
        pg_options: further arguments of :func:`shoal.init`, such as ``{"concurrency": 2}``.
        device_id: None, or the CPU.

    Raises:
        UsageError: there is a default group already, or an argument makes no sense.
        UnsupportedOperation: a backend or device that shoal has nothing for.
        RendezvousError: the processes did not find each other; RendezvousTimeout names the missing ones.
    """
    engine = parse_backend(backend)
    refuse_device("init_process_group", device_id)
    if pg_options is not None and not isinstance(pg_options, Mapping):
        raise UsageError(
            f"init_process_group: pg_options={pg_options!r}: expected a dict of arguments of shoal.init"
        )
    given = dict(pg_options or {})
    if engine.transport is not None and given.setdefault("transport", engine.transport) != engine.transport:
        raise UsageError(
            f"init_process_group: backend={backend!r} is the native engine over TCP, and pg_options say "
            f"transport={given['transport']!r}; leave one of them out"
        )
    with state.founding():
        options = {"timeout": seconds(timeout), "backend": engine.backend, **given}
        if store is None:
            url, own_rank, size = meeting_place(init_method, rank, world_size)
            world = init(url, rank=own_rank, size=size, **options)
        else:
            _check_store_alone(init_method, rank, world_size)
            world = init(store=store, rank=rank, size=world_size, **options)
        state.found(world, engine.name)


def destroy_process_group(group: GroupLike = None) -> None:
    """Close a group, or the default group with all that were made from it.

    Not a collective, and it never hangs: it gives itself 10 s (or the group's timeout, if that is less) to
    send what was submitted and to say goodbye, and the rank that serves the store of ``tcp://`` to let the
    others leave first.

    Args:
        group: None or ``group.WORLD`` for the default group; after that :func:`init_process_group` may be
            called again.

    Raises:
        UsageError: there is no default group, or ``group`` is something else.
    """
    if is_absent(group):
        return
    if group is None or group is state.world:
        default = state.forget()
        default.world.close(min(default.timeout, CLOSING))
        return
    pg = member_group(group, "destroy_process_group")
    assert pg is not None  # a rank that is not in the group has left above
    pg.close(min(pg.timeout, CLOSING))


def rebuild(
    *, min_size: int = 1, without: Iterable[int] = (), leave: bool = False, timeout: Duration | None = None
) -> None:
    """Make the default group anew, of the ranks that live; :func:`get_rank` may give another rank then.

    Every rank that lives calls it, after an error that a lost rank has caused, or to go on with fewer.  What
    was made with the old default group, such as a DistributedDataParallel, is made again with the new one.
    After it :func:`is_initialized` is False on a rank that has left.

    Args:
        min_size: with fewer ranks nothing is made.
        without: ranks that do not go on, though they live.  They call it too.
        leave: whether this rank does not go on.
        timeout: a timedelta, or seconds; None: that of the group.

    Raises:
        UsageError: there is no default group.
        GroupError: as :meth:`shoal.ProcessGroup.rebuild` raises; the default group is as it was.
    """
    old = default_group("rebuild")
    new = old.rebuild(min_size=min_size, without=without, leave=leave, timeout=seconds(timeout))
    if new is None:
        destroy_process_group()
    else:
        state.replace(new)


def _check_store_alone(init_method: str | None, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise UsageError(
            f"init_process_group: init_method={init_method!r} and store=: expected one place to meet"
        )
    if rank == -1 or world_size == -1:
        raise UsageError(
            f"init_process_group: with store=, rank and world_size must be given; got {rank} and {world_size}"
        )


def is_available() -> bool:
    """True: a program that can import this module can use it."""
    return True


def is_initialized() -> bool:
    """Whether there is a default group."""
    return state.world is not None


def is_torchelastic_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
