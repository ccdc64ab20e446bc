"""The process group: its identity, its lifetime, and the groups made from it.

The operations come from the base classes in ``collectives``, ``point_to_point``, ``objects``,
``monitored_barrier``, ``agreement`` and ``rebuild``.  A group is independent of the groups made from it: each
has its own data channel, and is closed, aborted or broken independently.  The connections, which they share,
are closed with the last group of the world.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..backend.base import Backend, GroupSpec, ident_of
from ..common.arguments import explain_unknown_keywords, keyword_names
from ..common.copy_refusal import refuses_copies
from ..common.formatting import encodable
from ..common.never_compile import never_compile
from ..errors import GroupAborted, GroupClosed, UnsupportedOperation
from ..links import Links, connect_some
from ..recorder import FlightRecorder
from ..spec import DTYPE_CODES
from ..store import PrefixStore, Store
from ..world import World, remaining
from .batch import Batch
from .block import end_block
from .choices import AS_PARENT, Choices
from .diagnostics import dumps
from .diagnostics.subgroup_lists import Given, ListWatch
from .evictions import eviction_report
from .in_order import channel_of
from .monitored_barrier import MonitoredBarrier
from .objects import Objects
from .rebuild import Rebuilding
from .submission import called
from .validation.arguments import OperationCall


@refuses_copies(
    "a ProcessGroup", "connections to the other ranks",
    "Keep it outside of the object that you copy; another process makes its own with shoal.init()",
)  # fmt: skip
class ProcessGroup(Objects, MonitoredBarrier, Rebuilding):
    """A group of processes that communicate with each other.

    Made by :func:`shoal.init`, :meth:`split` and :meth:`subgroup`.  Several threads may use a group if all
    ranks submit collectives in the same order.  As a context manager it is closed at the end of the block,
    and aborted first if an exception leaves the block.  If the group failed in the block, such as by a lost
    peer, and no call has raised that error, the end of the block raises it.
    """

    def __init__(
        self,
        spec: GroupSpec,
        world: World,
        links: Links,
        store: Store,
        *,
        timeout: float,
        parent: ProcessGroup | None = None,
    ) -> None:
        """Make a channel and wrap it; users call :func:`shoal.init` instead.

        Args:
            spec: the members.
            world: the world of the group.
            links: its connections.
            store: a store for its members only.
            timeout: default timeout of operations, in seconds.
            parent: the group that this one is made from; None: it is the first of its world.
        """
        super().__init__(spec, channel_of(links.backend, links.numbered(spec), store), timeout=timeout)
        self._world = world
        self._links = links
        self._store = store
        self._closing = threading.Lock()
        self._made: Counter[tuple[Any, ...]] = Counter()
        #: Whether it is the group of all ranks: an exception in its block ends all groups of the world.
        self._is_first = parent is None
        #: Detects that members passed different lists; shared by all groups of the world.
        self._lists: ListWatch = ListWatch() if parent is None else parent._lists

    @classmethod
    def _in(
        cls,
        world: World,
        links: Links,
        spec: GroupSpec,
        store: Store,
        *,
        timeout: float,
        parent: ProcessGroup | None = None,
    ) -> ProcessGroup:
        """Make a group and register it with its world."""
        group = world.make(links, lambda: cls(spec, world, links, store, timeout=timeout, parent=parent))
        if group is None:  # the world was closed meanwhile
            raise GroupClosed(f"{spec.name!r} cannot be made on rank {spec.rank}: its world is closed")
        dumps.watch(group)
        return group

    # -- identity ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process in this group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in this group."""
        return self._size

    @property
    def local_rank(self) -> int:
        """Rank of this process among those that the launcher started on this host."""
        return self._world.membership.local_rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the world group, in the order of their ranks in this group."""
        return self._spec.ranks if self._spec.world_ranks is None else self._spec.world_ranks

    @property
    def name(self) -> str:
        """Name of the group, unique in the job and equal on all members."""
        return self._spec.name

    @property
    def world(self) -> World:
        """The world of this process, which all groups made from one :func:`shoal.init` share."""
        return self._world

    @property
    def store(self) -> Store:
        """A key-value store of the members; other groups do not see its keys."""
        return self._store

    @property
    def timeout(self) -> float:
        """The default timeout of an operation, in seconds."""
        return self._timeout

    @property
    def recorder(self) -> FlightRecorder | None:
        """The record of the group's last operations; None if ``SHOAL_RECORDER_SIZE`` is 0."""
        return self._recorder

    def dump(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the state of the group on this rank to a JSON file; ``docs/recorder.md`` has the format.

        Any thread may call it at any time, in any state of the group.  It does not communicate.  With
        ``SHOAL_DUMP_DIR`` every rank does this when the group fails.

        Args:
            path: path of the file, or of a directory, in which a file with a unique name is written; None:
                ``SHOAL_DUMP_DIR``, or the working directory.

        Returns:
            The path of the file.

        Raises:
            OSError: the file cannot be written.
        """
        return dumps.write(self, path)

    @property
    def state(self) -> str:
        """``"open" "closing" "closed" "aborted" "broken"`` or, in a forked child, ``"forked"``.

        Aborted: a rank called :meth:`abort`.  Broken: the group failed for another reason, such as a lost
        peer, a timeout or a mismatch.
        """
        if self._state != "open":
            return self._state
        failure = self._channel.failure()
        if failure is None:
            return "open"
        return "aborted" if isinstance(failure, GroupAborted) else "broken"

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {self.state}>"

    # -- memory --------------------------------------------------------------------------------

    @explain_unknown_keywords(called)
    def empty(
        self,
        *shape: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Allocate an uninitialised tensor in memory that the backend uses without copies.

        With the native backend it is shared memory of the ranks on this host, where an all-reduce is fastest.
        Not a collective: any rank may call it, any number of times.

        Args:
            shape: as in ``torch.empty``.
            dtype: a dtype that can be sent.
            device: a device that the group supports; None: the CPU, if it is supported.

        Raises:
            OutOfSharedMemory: there is no memory left; the group stays usable.
        """
        call = self._call("empty")
        if dtype not in DTYPE_CODES:
            call.refuse(f"tensors of {dtype} cannot be sent")
        if self._state != "open":
            self._raise_refusal()
        dimensions = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        lengths = torch.Size(dimensions)  # type: ignore[arg-type]
        if any(length < 0 for length in lengths):
            call.refuse(f"the shape {tuple(lengths)} has a negative dimension")
        place = self._scratch_device if device is None else torch.device(device)
        call.device(place, "device is")
        return self._channel.empty(math.prod(lengths) * dtype.itemsize, place).view(dtype).view(lengths)

    # -- several messages together -------------------------------------------------------------

    def batch(self) -> Batch:
        """Collect sends and receives in a ``with`` block and submit them together at its end."""
        return Batch(self)

    # -- groups made from this one -------------------------------------------------------------

    def split(
        self,
        color: int | None,
        key: int | None = None,
        *,
        timeout: float | None = None,
        scope: str | None = None,
        concurrency: int | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> ProcessGroup | None:
        """Split the group into groups of ranks with the same ``color``.

        A collective: every rank of this group calls it, and it waits for the other ranks.

        Args:
            color: any integer, or None to be in no new group.
            key: ranks in the new group are ordered by it, and by rank in this group where keys are equal.
            timeout: timeout of this call, and default of operations in the new group, in seconds.
            scope, concurrency, backend, options: as in :meth:`subgroup`.

        Returns:
            The new group of this rank, or None if ``color`` is None.

        Raises:
            UsageError: ranks of one color passed different values of the arguments in the last line.
            GroupClosed: this rank or another one closed the group meanwhile.
        """
        call = self._call("split")
        choices = self._choices(call, scope, concurrency, backend, options)
        seconds = None if timeout is None else self._checked_timeout(timeout)
        for what, value in (("color", color), ("key", key)):
            if value is not None and (not isinstance(value, int) or not -(2**63) <= value < 2**63):
                call.refuse(f"{what} must be a 64-bit integer or None, got {value!r}")
        mine = [color is not None, color or 0, self.rank if key is None else key, choices.code]
        device = self._scratch_device
        table = torch.empty(self.size, len(mine), dtype=torch.int64, device=device)
        future = self.all_gather_single(table, torch.tensor(mine, device=device), timeout=timeout)
        rows = future.wait().tolist()
        codes = {(their_color, code) for joins, their_color, _, code in rows if joins}
        differing = {one for one, count in Counter(each for each, _ in codes).items() if count > 1}
        # All ranks have the same table, so either all of them call this or none.
        given = self.all_gather_object(str(choices), timeout=timeout).wait() if differing else []
        if color is None:
            return None
        members = sorted(
            (their_key, rank)
            for rank, (joins, their_color, their_key, _) in enumerate(rows)
            if joins and their_color == color
        )
        if color in differing:
            said = [f"rank {rank} gave {given[rank] or 'nothing'}" for rank in sorted(r for _, r in members)]
            call.refuse(f"the ranks of color {color} asked for different groups: {'; '.join(said)}")
        # The key of the exchange is unique to this split, and equal on all ranks.
        return self._make([rank for _, rank in members], f"split:{future.key:x}:{color}", seconds, choices)

    def subgroup(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        *,
        timeout: float | None = None,
        scope: str | None = None,
        concurrency: int | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> ProcessGroup:
        """Make a group of some ranks of this one, without communication; only its members call this.

        Args:
            ranks: ranks in this group, in the order of their ranks in the new one; the same list on all
                members.  Members that make several groups make them in the same order.
            name: part of the new group's name.
            timeout: default timeout of operations in the new group, in seconds; None: that of this group.
            scope: the extent of a failure, the same on all members.  ``"all"``: it breaks the group.
                ``"pair"``: it ends only messages between two ranks; such a group has messages, but no
                collectives.  None: as in this group.
            concurrency: number of lanes; None: that of this group.
            backend: name of the backend; None: that of this group.
            options: options of the backend, such as ``transport="tcp"``, in addition to those of this group.

        With another backend or other options the new group has its own connections: the members connect
        through this group's store, and the call waits for them for at most ``timeout``.

        Members that pass different lists, or other different arguments, wait in different groups.  About a
        second after the first collective or receive in each, both raise GroupAborted with the arguments; a
        call that waits for the members raises UsageError.
        """
        call = self._call("subgroup")
        seconds = None if timeout is None else self._checked_timeout(timeout)
        choices = self._choices(call, scope, concurrency, backend, options)
        members = [call.root(rank, "every element of ranks") for rank in ranks]
        if len(set(members)) != len(members):
            call.refuse(f"ranks names a rank twice: {members}")
        if self.rank not in members:
            call.refuse(f"this rank is not among the ranks {members}; only members call subgroup")
        with self._submitting:
            if self._state != "open" or self._channel.failure() is not None:
                self._raise_refusal()
        return self._subgroup(members, name, seconds, choices)

    def _subgroup(
        self,
        members: list[int],
        name: str | None,
        timeout: float | None,
        choices: Choices = AS_PARENT,
        *,
        asked: str | None = None,
    ) -> ProcessGroup:
        """:meth:`subgroup`, in any state of this group; ``asked``: the choices of another rank."""
        asked = str(choices) if asked is None else asked
        with self._submitting:
            identity = (name, asked, *members)
            self._made[identity] += 1
            given = Given(name, asked, tuple(members), self._made[identity])
        listed = ",".join(map(str, members))
        label = f"{name or 'subgroup'}:{listed}:{given.count}{asked and f':{asked}'}"
        group = self._make(members, label, timeout, choices, given)
        if len(members) > 1:
            group._on_first = partial(self._lists.first_operation, self, given)
        return group

    def _choices(
        self,
        call: OperationCall,
        scope: str | None,
        concurrency: int | None,
        backend: str | None,
        options: dict[str, Any],
    ) -> Choices:
        """Return the validated choices of a new group."""
        scope = self._spec.scope if scope is None else scope
        if scope not in ("all", "pair"):
            call.refuse(f"scope={scope!r}: expected 'all' or 'pair'")
        choices = Choices(None if scope == "all" else scope, concurrency, backend, options)
        choices.checked(called(call.name, self), keyword_names(getattr(ProcessGroup, call.name)), self._links)
        factory = choices.engine(self._links)[0] if choices.own_links else None
        scopes = getattr(factory, "scopes", self._backend.scopes)
        if scope not in scopes:
            chosen = self._backend.name if backend is None else backend
            raise UnsupportedOperation(f"groups of the backend {chosen!r} have no scope={scope!r}")
        return choices

    def _make(
        self,
        members: list[int],
        label: str,
        timeout: float | None,
        choices: Choices,
        given: Given | None = None,
    ) -> ProcessGroup:
        label = encodable(label)
        name = f"{self.name}/{label}"
        ranks = tuple(self._spec.ranks[rank] for rank in members)
        store = PrefixStore(f"{label}/", self._store)
        seconds = self._timeout if timeout is None else timeout
        links = self._connected(ranks, store, seconds, choices, given)
        spec = GroupSpec(
            name=name,
            ident=ident_of(f"{self._spec.ident:x}/{label}"),
            rank=members.index(self.rank),
            ranks=ranks,
            concurrency=choices.concurrency or self._spec.concurrency,
            options=dict(links.options),
            scope=choices.scope or "all",
            world_ranks=self._spec.world_ranks and tuple(self.ranks[rank] for rank in members),
        )
        return self._in(self._world, links, spec, store, timeout=seconds, parent=self)

    def _connected(
        self, ranks: tuple[int, ...], store: Store, timeout: float, choices: Choices, given: Given | None
    ) -> Links:
        """Return connections for ``choices``: those of this group, or new ones."""
        if not choices.own_links:
            return self._links
        factory, options = choices.engine(self._links)
        if factory is self._links.factory and options == self._links.options:
            return self._links
        watching = nullcontext(lambda: None) if given is None else self._lists.connecting(self, given)
        with watching as check:
            return connect_some(
                self._world.membership, ranks, factory,
                timeout=timeout, options=options, store=store, lost=self._links.lost, check=check,
            )  # fmt: skip

    @property
    def _backend(self) -> Backend:
        return self._links.backend

    def _made_again(self, spec: GroupSpec, store: Store) -> ProcessGroup:
        return self._in(self._world, self._links, spec, store, timeout=self._timeout, parent=self)

    def _reports_evictions(self) -> Callable[[Sequence[int], Collection[int]], None]:
        return eviction_report(self._spec, self._links, self._world.membership.meeting)

    def _become(self, successor: ProcessGroup) -> None:
        super()._become(successor)
        successor._is_first, self._is_first = self._is_first, False

    # -- the end -------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Complete submitted operations, notify the other ranks, and release all resources.

        It may be called several times, and is not a collective: a hung peer delays it by at most ``timeout``.
        It waits for operations that can still complete, and for ranks that have not finished collectives that
        this rank has called; operations that need a rank that closes the group too fail with GroupClosed.
        Groups made from this one stay open; the connections are closed with the last group.  In a forked
        child it does nothing.

        Args:
            timeout: in seconds; None: the group's default.

        Raises:
            CollectiveMismatch: the ranks called different operations, and no operation has raised it here.
        """
        seconds = self._timeout if timeout is None else self._checked_timeout(timeout)
        if self._state == "forked":
            return
        deadline = time.monotonic() + seconds
        with self._closing:
            if self._state == "closed":
                return
            dumps.closing(self)
            self._begin_close()
            self._close_pending(remaining(deadline))
            with ExitStack() as steps:  # runs all callbacks, in reverse order, even if one raises
                steps.callback(dumps.closed)
                steps.callback(lambda: self._world.discard(self, remaining(deadline)))
                steps.callback(self._has_closed)
                steps.callback(lambda: self._lists.forget(self, remaining(deadline)))
                self._channel.close(remaining(deadline))

    def _has_closed(self) -> None:
        self._ended = True
        self._state = "closed"

    def _become_forked(self) -> None:
        # The locks may be held by threads that do not exist in the child.
        self._submitting = threading.Lock()
        self._closing = threading.Lock()
        self._lists = ListWatch()
        if self._state != "closed":
            self._state = "forked"

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        successor = None if self._line is None or self._line.newest is self else self._line.newest
        try:
            if successor is not None:  # the block now belongs to the rebuilt group
                successor.__exit__(kind, error, trace)
        finally:
            may_abort = self._state == "open"
            end_block(self, error, may_abort, is_first=self._is_first, goes_on=successor is not None)

    @never_compile
    def __del__(self) -> None:
        if hasattr(self, "_lists") and self._state not in ("closed", "forked"):
            self._world.dropped(self)
