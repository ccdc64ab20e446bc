"""The process group: its identity, its lifetime, its operations, and the groups made from it.

Operations on tensors are in the base class.  The others are functions of their modules: ``objects``,
``monitored_barrier``, ``agreement``, ``rebuild`` and ``subgroups``.  A group is independent of the groups
made from it: each has its own data channel, and is closed, aborted or broken independently.  The connections,
which they share, are closed with the last group of the world.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

import torch

from .. import config, failure_report
from ..backend.agreement import AgreementOp
from ..backend.base import Backend, GroupSpec
from ..common.arguments import explain_unknown_keywords
from ..common.copy_refusal import refuses_copies
from ..common.formatting import error_repr
from ..common.never_compile import never_compile
from ..errors import CollectiveMismatch, GroupClosed, GroupError, PeerLost
from ..future import Future
from ..links import Links
from ..recorder import FlightRecorder
from ..spec import ANY_SOURCE, DTYPE_CODES, FailureScope, GroupState
from ..statistics import GroupStatistics
from ..store import Store
from ..world import World, remaining
from . import monitored_barrier, objects, subgroups
from .agreement import Agreement, AgreementClient
from .batch import Batch
from .diagnostics import dumps
from .diagnostics.member_lists import MemberListChecker
from .operations import TensorOperations, operation_label
from .ordered_channel import channel_of
from .rebuild import RebuildHistory, Rebuilt, rebuild
from .subgroups import SubgroupOptions
from .submission import OperationSubmitter

#: operations of ``agree`` on integers
_IntegerOp: TypeAlias = Literal[
    "and", "or", "min", "max", "sum",
    AgreementOp.AND, AgreementOp.OR, AgreementOp.MIN, AgreementOp.MAX, AgreementOp.SUM,
]  # fmt: skip


@refuses_copies(
    "a ProcessGroup", "connections to the other ranks",
    "Keep it outside of the object that you copy; another process makes its own with shoal.init()",
)  # fmt: skip
class ProcessGroup(TensorOperations):
    """A group of processes that communicate with each other.

    Made by :func:`shoal.init`, :meth:`split` and :meth:`subgroup`.  Several threads may use a group if all
    ranks submit collectives in the same order.  As a context manager it is closed at the end of the block,
    and aborted first if an exception leaves the block.  If the group failed in the block, such as by a lost
    peer, and no call has raised that error, the end of the block raises it.

    Attributes:
        epoch: greater than that of the old group; 0: it was not rebuilt.
        rebuilt: its relation to the old group; None: it was not rebuilt.
    """

    #: The :class:`shoal.Join` whose block this rank is in.
    join_block: object = None
    epoch: int = 0
    rebuilt: Rebuilt | None = None

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
        channel = channel_of(links.backend, links.numbered(spec), store)
        super().__init__(OperationSubmitter(spec, channel, timeout=timeout))
        self._world = world
        self._links = links
        self._store = store
        self._closing = threading.Lock()
        #: number of subgroups made with each name, options and list
        self._made: Counter[tuple[Any, ...]] = Counter()
        #: Whether it is the group of all ranks: an exception in its block ends all groups of the world.
        self._is_first = parent is None
        #: Detects that members passed different lists; shared by all groups of the world.
        self._lists: MemberListChecker = MemberListChecker() if parent is None else parent._lists
        self._agreements = AgreementClient(
            self._submitter, store, partial(_report_evictions, spec, links, world.membership.meeting)
        )
        self._history = RebuildHistory(spec, store, is_world=parent is None)
        #: the new group of a rebuild that failed before it was complete
        self._pending: ProcessGroup | None = None

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
        return self._submitter.recorder

    def stats(self) -> GroupStatistics:
        """Counters of this rank: operations, bytes, latencies, and the ranks for which it waited.

        Never communicates; any thread may call it at any time.  For a share of time, subtract the
        ``waited_s`` of two calls.

        Raises:
            UnsupportedOperation: the backend of the group counts nothing.
        """
        return self._submitter.ask(lambda channel: channel.statistics())

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
    def state(self) -> GroupState:
        """OPEN, CLOSING, CLOSED, ABORTED, BROKEN or, in a forked child, FORKED; equal to ``"open"`` etc.

        Aborted: a rank called :meth:`abort`.  Broken: the group failed for another reason, such as a lost
        peer, a timeout or a mismatch.
        """
        return self._submitter.state

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {self.state}>"

    # -- memory --------------------------------------------------------------------------------

    @explain_unknown_keywords(operation_label)
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
        if self._submitter.local_state is not GroupState.OPEN:
            self._submitter.raise_unusable()
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
        scope: FailureScope | str | None = None,
        concurrency: int | None = None,
        algorithm: str | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> ProcessGroup | None:
        """Split the group into groups of ranks with the same ``color``.

        A collective: every rank of this group calls it, and it waits for the other ranks.

        Args:
            color: any integer, or None to be in no new group.
            key: ranks in the new group are ordered by it, and by rank in this group where keys are equal.
            timeout: timeout of this call, and default of operations in the new group, in seconds.
            scope, concurrency, algorithm, backend, options: as in :meth:`subgroup`.

        Returns:
            The new group of this rank, or None if ``color`` is None.

        Raises:
            UsageError: ranks of one color passed different values of the arguments in the last line.
            GroupClosed: this rank or another one closed the group meanwhile.
        """
        call = self._call("split")
        chosen = SubgroupOptions.checked(call, self, scope, concurrency, algorithm, backend, options)
        return subgroups.split(self, call, color, key, timeout, chosen)

    def subgroup(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        *,
        timeout: float | None = None,
        scope: FailureScope | str | None = None,
        concurrency: int | None = None,
        algorithm: str | None = None,
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
            algorithm: as in :func:`shoal.init`; None: that of this group.
            backend: name of the backend; None: that of this group.
            options: options of the backend, such as ``transport="tcp"``, in addition to those of this group.

        With another backend or other options the new group has its own connections: the members connect
        through this group's store, and the call waits for them for at most ``timeout``.

        Members that pass different lists, or other different arguments, wait in different groups.  About a
        second after the first collective or receive in each, both raise GroupAborted with the arguments; a
        call that waits for the members raises UsageError.
        """
        call = self._call("subgroup")
        seconds = self._submitter.checked_timeout(timeout)
        chosen = SubgroupOptions.checked(call, self, scope, concurrency, algorithm, backend, options)
        members = [call.root(rank, "every element of ranks") for rank in ranks]
        if len(set(members)) != len(members):
            call.refuse(f"ranks names a rank twice: {members}")
        if self.rank not in members:
            call.refuse(f"this rank is not among the ranks {members}; only members call subgroup")
        with self._submitter.lock:
            self._submitter.check_usable()
        return self._subgroup(members, name, seconds, chosen)

    def _subgroup(
        self,
        members: list[int],
        name: str | None,
        timeout: float | None,
        options: SubgroupOptions = subgroups.INHERITED,
        *,
        asked: str | None = None,
    ) -> ProcessGroup:
        """:meth:`subgroup`, in any state of this group; ``asked``: the options of another rank."""
        return subgroups.subgroup(
            self, members, name, timeout, options, str(options) if asked is None else asked
        )

    # -- objects -------------------------------------------------------------------------------

    @explain_unknown_keywords(operation_label)
    def all_gather_object(self, obj: Any, *, timeout: float | None = None) -> Future[list[Any]]:
        """Gather picklable objects of all ranks on all ranks; the future's value is their list."""
        return objects.all_gather(self, obj, timeout)

    @explain_unknown_keywords(operation_label)
    def gather_object(
        self, obj: Any, root: int = 0, *, dst: int | None = None, timeout: float | None = None
    ) -> Future[list[Any] | None]:
        """Gather picklable objects of all ranks on rank ``root``; the value is None on other ranks."""
        return objects.gather(self, obj, root, dst, timeout)

    @explain_unknown_keywords(operation_label)
    def broadcast_object(
        self, obj: Any = None, root: int = 0, *, src: int | None = None, timeout: float | None = None
    ) -> Future[Any]:
        """Broadcast a picklable object of rank ``root``; there the future's value is ``obj``, not a copy."""
        return objects.broadcast(self, obj, root, src, timeout)

    @explain_unknown_keywords(operation_label)
    def scatter_object(
        self,
        objs: Sequence[Any] | None = None,
        root: int = 0,
        *,
        src: int | None = None,
        timeout: float | None = None,
    ) -> Future[Any]:
        """Send ``objs[r]`` of rank ``root`` to rank *r*; ``objs`` is None on other ranks.

        The root gets its own object, not a copy.
        """
        return objects.scatter(self, objs, root, src, timeout)

    @explain_unknown_keywords(operation_label)
    def send_object(self, obj: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> Future[None]:
        """Send a picklable object to rank ``dst``, which calls :meth:`recv_object`."""
        return objects.send(self, obj, dst, tag, timeout)

    @explain_unknown_keywords(operation_label)
    def recv_object(
        self, src: int = ANY_SOURCE, tag: int = 0, *, timeout: float | None = None
    ) -> Future[Any]:
        """Receive an object sent by :meth:`send_object`."""
        return objects.recv(self, src, tag, timeout)

    # -- agreements and failures ---------------------------------------------------------------

    @explain_unknown_keywords(operation_label)
    def monitored_barrier(self, *, timeout: float | None = None) -> Future[None]:
        """A barrier that reports, on every rank, the ranks that did not arrive in time.

        It costs more than :meth:`barrier`: two messages per rank, all with rank 0.

        Raises:
            OperationTimeout: through the future; ``ranks`` has all ranks that did not arrive within
                ``timeout``.  The group is then aborted with this reason.
        """
        return monitored_barrier.monitored_barrier(self, timeout)

    @overload
    def agree(
        self, value: int, op: _IntegerOp = AgreementOp.AND, *, timeout: float | None = None
    ) -> Future[Agreement[int]]: ...

    @overload
    def agree(
        self, value: Iterable[int], op: Literal["common", AgreementOp.COMMON], *, timeout: float | None = None
    ) -> Future[Agreement[tuple[int, ...]]]: ...

    @overload
    def agree(
        self, value: bytes, op: Literal["gather", AgreementOp.GATHER], *, timeout: float | None = None
    ) -> Future[Agreement[tuple[bytes, ...]]]: ...

    @explain_unknown_keywords(operation_label)
    def agree(
        self, value: Any, op: AgreementOp | str = AgreementOp.AND, *, timeout: float | None = None
    ) -> Future[Agreement[Any]]:
        """Agree with all surviving ranks on one value, and on the set of survivors.

        It works on a group that is open, broken or aborted.  Every surviving rank calls it; the k-th calls of
        all ranks belong together.  All ranks that get a result get the same one, even if ranks fail
        meanwhile.  Without a failure it takes four messages per rank.

        Args:
            value: this rank's vote: an integer of 64 bits (or a bool); for ``"common"`` several integers; for
                ``"gather"`` bytes.  At most 4 KiB, less in groups of more than 1,024 ranks.
            op: the reduction of the votes, an ``AgreementOp`` or its name: ``"and"``, ``"or"`` (bitwise),
                ``"min"``, ``"max"``, ``"sum"`` (modulo 2**64), ``"common"`` or ``"gather"``.
            timeout: in seconds, for the decision; None: that of the group plus ``SHOAL_VOTE_TIMEOUT``.

        Returns:
            A future of an :class:`Agreement`.

        Raises:
            UsageError: the value is not a valid vote for this ``op``.
            UnsupportedOperation: the backend of the group has no agreements.
            GroupClosed: this rank has closed the group.
            Evicted: through the future; the other ranks continue without this rank.
            QuorumLost: through the future; too few ranks can be reached to decide.
            OperationTimeout: through the future; a rank that can be reached did not answer in time.
            RebuildCalled: through the future; another rank has called :meth:`~shoal.ProcessGroup.rebuild`.
            CollectiveMismatch: through the future; the ranks passed different values of ``op``.

        Ranks that have not voted ``SHOAL_VOTE_TIMEOUT`` seconds after the first vote are excluded.  The
        algorithm is Paxos (L. Lamport, "The Part-Time Parliament", 1998) with one leader.  Its purpose, and
        its use on a broken group, are those of ULFM's ``MPI_Comm_agree``.
        """
        return self._agreements.agree(self._call("agree"), value, op, timeout)

    @explain_unknown_keywords(operation_label)
    def rebuild(
        self,
        *,
        min_size: int = 1,
        without: Iterable[int] = (),
        leave: bool = False,
        note: bytes = b"",
        fence: bool = True,
        timeout: float | None = None,
    ) -> ProcessGroup | None:
        """Make a group of the surviving ranks, and close this one.

        Every surviving rank calls it, in any state of the group; it waits for the others.  The new group uses
        the existing connections, so this takes milliseconds.  Ranks below the new size keep their numbers;
        the highest ranks replace lost ones.  Messages of the old group never arrive in the new one, and its
        pending operations fail with GroupClosed.  Subgroups of this group are not changed.

        Args:
            min_size: minimum size of the new group; if ranks pass different values, the largest counts.
            without: ranks to exclude, for example because they are slow.  They call ``rebuild`` too.
            leave: whether this rank leaves.
            note: bytes for all other ranks, in ``rebuilt.notes`` of the new group; at most 4,000, fewer in
                groups of more than 1,000 ranks.
            fence: whether to end processes of lost ranks that still run on this host, by SIGKILL.  Otherwise
                they could write into memory that the new group uses: pass False only if the caller ends them.
            timeout: in seconds; None: that of the group plus twice ``SHOAL_VOTE_TIMEOUT``.

        Returns:
            The new group, with a greater ``epoch``, a new store, and the timeout of this one; None: this rank
            has left.

        Raises:
            TooFewRanks: fewer than ``min_size`` ranks would remain.
            Evicted: the other ranks continue without this rank.
            QuorumLost: too few ranks can be reached to decide.
            OperationTimeout: a rank that can be reached did not answer in time.
            GroupClosed: this rank has closed the group.
            UnsupportedOperation: the backend of the group has no agreements.

        After an error this group is unchanged, and the same ranks can call it again.  Compare ULFM's
        ``MPI_Comm_shrink``.
        """
        return rebuild(self, min_size, without, leave, note, fence, timeout)

    @property
    def _backend(self) -> Backend:
        return self._links.backend

    def _make_on_same_links(self, spec: GroupSpec, store: Store) -> ProcessGroup:
        return self._in(self._world, self._links, spec, store, timeout=self._timeout, parent=self)

    def _set_previous_epoch(self, epoch: int) -> None:
        """Set the epoch of this new group, which replaces one of ``epoch`` without a rebuild."""
        self.epoch = self._history.epoch = epoch + 1

    # -- the end -------------------------------------------------------------------------------

    def abort(self, reason: str = "") -> None:
        """Abort the group on all ranks, from any thread.

        All pending and later operations fail with GroupAborted.  Groups made from this one are not affected.
        The group must still be closed, to release its resources.

        Args:
            reason: part of the error message on the other ranks.
        """
        self._submitter.abort(reason)

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
        seconds = self._submitter.checked_timeout(timeout)
        if self._submitter.local_state is GroupState.FORKED:
            return
        deadline = time.monotonic() + seconds
        with self._closing:
            if self._submitter.local_state is GroupState.CLOSED:
                return
            dumps.dump_before_close(self)
            self._begin_close()
            if self._pending is not None:
                self._pending.close(remaining(deadline))
            with ExitStack() as steps:  # runs all callbacks, in reverse order, even if one raises
                steps.callback(dumps.stop_if_idle)
                steps.callback(lambda: self._world.discard(self, remaining(deadline)))
                steps.callback(self._submitter.mark_closed)
                steps.callback(lambda: self._lists.unwatch(self._submitter, remaining(deadline)))
                self._channel.close(remaining(deadline))

    def _begin_close(self) -> None:
        self._submitter.begin_close(leaves_world=self._is_first)

    def _become_forked(self) -> None:
        self._closing = threading.Lock()  # it may be held by a thread that does not exist in the child
        self._lists = MemberListChecker()
        self._submitter.become_forked()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        successor = None if self._history.newest is self else self._history.newest
        try:
            if successor is not None:  # the block now belongs to the rebuilt group
                successor.__exit__(kind, error, trace)
        finally:
            self._end_block(error, has_successor=successor is not None)

    def _end_block(self, error: BaseException | None, *, has_successor: bool) -> None:
        """Close the group at the end of its block.

        Args:
            error: the exception that leaves the block.
            has_successor: whether a rebuild has replaced the group; then the new group reports the failure.

        Raises:
            GroupError: the failure of the group, also one detected on closing, if no call has raised it and
                no exception leaves the block.
        """
        orderly = error is None or (isinstance(error, SystemExit) and not error.code)
        may_abort = self._submitter.local_state is GroupState.OPEN
        unseen = self._unseen_failure() if error is None and not has_successor else None
        try:
            if error is not None and not orderly and may_abort:
                self._abort_after(error)
            self.close()
        except CollectiveMismatch:
            if orderly:
                raise
        if unseen is not None:
            raise self._submitter.error_for_call(unseen)

    def _unseen_failure(self) -> GroupError | None:
        """Return the failure of the open group if no call has raised it.

        A lost rank is reported once, by the first group of the world that detects it, or by calls of an RPC
        agent that uses the world.
        """
        if self.state not in (GroupState.BROKEN, GroupState.ABORTED) or self._channel.reported:
            return None
        failure = self._channel.failure()
        known = self._world.losses_reported or self._backend.losses_reported
        return None if isinstance(failure, PeerLost) and known else failure

    def _abort_after(self, error: BaseException) -> None:
        reason = f"an exception left the group's block on rank {self.rank}: {error_repr(error)}"
        if self._is_first:
            try:
                self._world.abort(reason)
            finally:
                self._world.close(self.timeout)
        self.abort(reason)

    @never_compile
    def __del__(self) -> None:
        closed = (GroupState.CLOSED, GroupState.FORKED)
        if hasattr(self, "_pending") and self._submitter.local_state not in closed:
            self._world.dropped(self)


def _report_evictions(
    spec: GroupSpec, links: Links, meeting: str, lost: Sequence[int], dead: Collection[int]
) -> None:
    """Report the lost ranks of a decision to the launcher, which ends their processes.

    Args:
        meeting: the rendezvous of the world's ranks.
        dead: the lost ranks that have failed or left.
    """
    unreachable = links.lost() if config.QUORUM.get() == "any" else ()  # they then count as failed
    evicted = [spec.ranks[rank] for rank in lost if rank not in dead or spec.ranks[rank] in unreachable]
    failure_report.evicted(evicted, meeting)
