"""Creation, rebuild and destruction of the default group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlunsplit

import torch

from ..backend.registry import backend_factory
from ..errors import UsageError
from ..initialize import default_url, init
from ..rendezvous.launcher_variables import read, tcp_url
from ..store.external.url import split_url
from ..torch_terms.arguments import CLOSE_TIMEOUT_S, Duration, seconds
from .backend import parse_backend, refuse_device
from .state import GroupLike, default_group, is_non_member, member_group, state


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
    """Connect to the other processes of the job and create the default group.

    All processes call it; it returns when all are connected.  Without a launcher and without arguments, it
    creates a group of size 1.

    Args:
        backend: ``"gloo"`` and ``"cpu:gloo"`` select the native engine, ``"tcp"`` the native engine without
            shared memory, None and ``"shoal"`` the backend of ``SHOAL_BACKEND`` (native); ``"nccl"`` and
            ``"cpu:gloo,cuda:nccl"`` NCCL for CUDA tensors and the native engine for others; or ``"mpi"``, or
            a name registered with :func:`shoal.register_backend`.
        init_method: the rendezvous: ``env://`` (None), ``tcp://host:port``, ``file:///path``, or another URL
            of :func:`shoal.init`.  ``env://`` reads the variables of launchers, and those that scripts set
            themselves: MASTER_ADDR and MASTER_PORT, with RANK and WORLD_SIZE or arguments.
        timeout: limit of the rendezvous, and default timeout of operations: a timedelta, or seconds; None:
            ``SHOAL_TIMEOUT`` (300 s).
        world_size, rank: -1: from the launcher, else in order of arrival.
        store: a store for the rendezvous, instead of ``init_method``; requires rank and size.  A store of
            shoal or of ``torch.distributed``, the same for all ranks.  The caller closes it, and must keep it
            usable until the default group is destroyed.
        group_name: not used, as in torch.
        pg_options: further arguments of :func:`shoal.init`, such as ``{"concurrency": 2}``.
        device_id: None, the CPU, or with ``"nccl"`` a CUDA device.  Not used: a group uses the device of the
            tensors of its first operation.

    Raises:
        UsageError: a default group exists already, or an argument is invalid.
        UnsupportedOperation: shoal does not support the backend or device.
        RendezvousError: the rendezvous failed; RendezvousTimeout names the missing ranks.
    """
    engine = parse_backend(backend)
    refuse_device("init_process_group", device_id, engine.backend)
    if pg_options is not None and not isinstance(pg_options, Mapping):
        raise UsageError(
            f"init_process_group: pg_options={pg_options!r}: expected a dict of arguments of shoal.init"
        )
    given = dict(pg_options or {})
    if engine.transport is not None and given.setdefault("transport", engine.transport) != engine.transport:
        raise UsageError(
            f"init_process_group: backend={backend!r} is the native engine over TCP, but pg_options contain "
            f"transport={given['transport']!r}; omit one of them"
        )
    with state.creating():
        options = {"timeout": seconds(timeout), "backend": engine.backend, **given}
        if store is None:
            address = init_method or default_url(backend_factory(engine.backend))
            url, own_rank, size = rendezvous_address(address, rank, world_size)
            world = init(url, rank=own_rank, size=size, **options)
        else:
            _check_store_alone(init_method, rank, world_size)
            world = init(store=store, rank=rank, size=world_size, **options)
        state.set_world(world, engine.name)


def destroy_process_group(group: GroupLike = None) -> None:
    """Close a group; for the default group, close all groups made from it too.

    Not a collective, and it never hangs: sending the submitted operations and notifying the peers takes at
    most 10 s (or the group's timeout, if that is less).  Within this time, the rank that serves the store of
    ``tcp://`` waits for the other ranks to disconnect.

    Args:
        group: None or ``group.WORLD`` for the default group; :func:`init_process_group` may then be called
            again.

    Raises:
        UsageError: there is no default group, or ``group`` is not a group.
    """
    if is_non_member(group):
        return
    if group is None or group is state.world:
        default = state.clear()
        default.world.close(min(default.timeout, CLOSE_TIMEOUT_S))
        return
    pg = member_group(group, "destroy_process_group")
    assert pg is not None  # non-members have returned above
    pg.close(min(pg.timeout, CLOSE_TIMEOUT_S))


def rebuild(
    *,
    min_size: int = 1,
    without: Iterable[int] = (),
    leave: bool = False,
    note: bytes = b"",
    fence: bool = True,
    timeout: Duration | None = None,
) -> None:
    """Replace the default group by one of the surviving ranks; :func:`get_rank` may then return another rank.

    All surviving ranks call it, after an error caused by a lost rank, or to continue with fewer ranks.
    Recreate objects that use the old default group, such as a DistributedDataParallel.  On a rank that has
    left, :func:`is_initialized` then returns False.

    Args:
        min_size: minimum number of ranks; with fewer, no group is created.
        without: running ranks to exclude.  They must call it too.
        leave: whether this rank leaves.
        note: bytes for all other ranks, which ``group.WORLD.rebuilt.notes`` then has, by old rank.
        fence: whether to end processes of lost ranks that still run on this host.
        timeout: a timedelta, or seconds; None: that of the group.

    Raises:
        UsageError: there is no default group.
        GroupError: as for :meth:`shoal.ProcessGroup.rebuild`; the default group is unchanged.
    """
    old = default_group("rebuild")
    new = old.rebuild(
        min_size=min_size, without=without, leave=leave, note=note, fence=fence, timeout=seconds(timeout)
    )
    if new is None:
        destroy_process_group()
    else:
        state.world = new


def _check_store_alone(init_method: str | None, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise UsageError(f"init_process_group: pass either init_method={init_method!r} or store=, not both")
    if rank == -1 or world_size == -1:
        raise UsageError(
            f"init_process_group: store= requires rank and world_size; got {rank} and {world_size}"
        )


def is_available() -> bool:
    """True: the package is importable."""
    return True


def is_initialized() -> bool:
    """Return whether there is a default group."""
    return state.world is not None


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


# -- torch's ``init_method`` and environment, as the arguments of ``shoal.init`` -----------------


#: The query parameters of torch's URLs.
_RANK, _SIZE, _LIBUV = "rank", "world_size", "use_libuv"


def rendezvous_address(
    init_method: str | None, rank: int, world_size: int, environ: Mapping[str, str] = os.environ
) -> tuple[str, int | None, int | None]:
    """Return URL, rank and size for ``shoal.init``.

    Args:
        init_method: as in torch: ``env://`` (None), ``tcp://host:port`` or ``file:///path``, optionally with
            ``?rank=0&world_size=2``; or another URL of shoal.
        rank, world_size: -1: taken from the URL or the environment, or assigned in order of arrival.

    Raises:
        UsageError: rank or size is given twice, or is not a number.
    """
    if init_method is not None and not isinstance(init_method, str):
        raise UsageError(f"init_method={init_method!r}: expected a str")
    url, query = _without_query(init_method or "env://")
    own_rank = _number("rank", rank, query.get(_RANK))
    own_size = _number("world_size", world_size, query.get(_SIZE))
    if url == "env://":
        return _in_environment(own_rank, own_size, environ)
    return url, own_rank, own_size


def _without_query(url: str) -> tuple[str, dict[str, str]]:
    parts = split_url("init_method", url)
    pairs = parse_qsl(parts.query)
    ours = {name: value for name, value in pairs if name in (_RANK, _SIZE)}
    others = [(name, value) for name, value in pairs if name not in (_RANK, _SIZE, _LIBUV)]
    if not parts.query:
        return url, ours  # urlunsplit would drop the slashes of env://
    plain = urlunsplit(parts._replace(query=urlencode(others)))
    return ("env://" if parts.scheme == "env" else plain), ours


def _number(what: str, argument: int, in_url: str | None) -> int | None:
    if not isinstance(argument, int):
        raise UsageError(f"{what}={argument!r}: expected an integer")
    if in_url is None:
        return None if argument == -1 else argument
    if argument != -1:
        raise UsageError(f"{what} is given twice: {argument} as an argument and {in_url} in the URL")
    return _parsed(what, in_url, " in the URL")


def _parsed(name: str, text: str, where: str = "") -> int:
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}{where}: expected a non-negative integer")
    return int(text)


def _in_environment(
    rank: int | None, size: int | None, environ: Mapping[str, str]
) -> tuple[str, int | None, int | None]:
    """Return ``env://``, or the address in the MASTER_ADDR and MASTER_PORT of a script without a launcher.

    Such a script passes rank and size as arguments, or one of them in RANK or WORLD_SIZE.  A launcher's
    variables come first, because they contain more (the processes on this host, the job's incarnation).
    """
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return "env://", rank, size
    others = {name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    if read(others) is not None:
        return "env://", rank, size
    address, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    rank = _or_variable(rank, environ, "RANK")
    size = _or_variable(size, environ, "WORLD_SIZE")
    if not address or not port or rank is None or size is None:
        return "env://", rank, size
    return tcp_url(address, _parsed("MASTER_PORT", port)), rank, size


def _or_variable(value: int | None, environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return value if value is not None or not text else _parsed(name, text)
