"""The interface of a data channel: what moves tensors for one group.

A :class:`Backend` belongs to a process and knows how to connect it to its peers; a
:class:`DataChannel` belongs to one group.  :mod:`shoal.group` validates, numbers and records calls
and hands each one as an :class:`~shoal.spec.Operation` to ``DataChannel.submit``: a channel never
sees a wrong shape, a non-contiguous tensor or a closed group.

The idea of a replaceable data channel is from the design of torch.distributed (``DataChannel`` in
its first proposal).
"""

from __future__ import annotations

import abc
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from ..common.copy_refusal import refuses_copies
from ..errors import GroupError, UnsupportedOperation
from ..future import Future
from ..recorder import FlightRecorder
from ..rendezvous.membership import Membership as Membership
from ..spec import Operation, OpKind, ReduceOp
from .agreements import Agreeing, Op


def ident_of(label: str) -> int:
    """The 64 bits by which a group is known on the wire, from what tells it from all others."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group as a backend sees it.

    Attributes:
        name: unique in the job, equal on all members.
        ident: see :func:`ident_of`.
        ranks: the members' ranks in the first group of the job, in group order; ``ranks[rank]`` is this
            process.
        concurrency: number of lanes.
        options: the backend's own, as given to ``shoal.init``.
        scope: ``"all"``: what breaks between two members breaks the group; ``"pair"``: it fails what these
            two exchange, and the group carries no collectives.
        world_ranks: their ranks in the group of all that the program has now, if it was rebuilt.
    """

    name: str
    ident: int
    rank: int
    ranks: tuple[int, ...]
    concurrency: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    scope: str = "all"
    world_ranks: tuple[int, ...] | None = None


class Shortcut(Protocol):
    """The numbers of a group's calls, and a short way for the usual ones.

    Attributes:
        number: of the next call.
        open: whether calls are taken.
    """

    number: int
    open: bool

    def submit(
        self,
        kind: OpKind,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        op: int,
        root: int,
        timeout: float,
    ) -> Future[Any] | None:
        """Submit and record a collective on at most one tensor each way; the call has the next number then.

        ``x`` and ``out`` are whatever the user passed, the same object where the operation is in place, and
        so is ``timeout``; ``op`` is the code of the reduction.  None says that something is unusual or wrong
        about the call, that it is the first one, that it is made in a callback, or that the channel is
        broken: nothing was sent, and the call is to be validated and submitted as any other.
        """


class NoShortcut:
    """The shortcut of a channel that has only the long way: it takes no call."""

    __slots__ = ("number", "open")

    def __init__(self) -> None:
        self.number = 0
        self.open = True

    def submit(self, *call: object) -> None:
        """Nothing is usual."""


@refuses_copies(
    "a channel",
    "operations of a group",
    "Keep it outside of the object that you copy",
)
class DataChannel(abc.ABC):
    """Moves the tensors of one group."""

    #: Called, any number of times and from any thread, when an operation of a broken channel is seen to have
    #: failed.  Its group sets it; a channel that does not call it is looked at from time to time.
    on_failure: Callable[[], None] | None = None
    #: Whether the error that ended the group has reached the program.  Of a channel that cannot say: True.
    reported: bool = True
    #: device types whose tensors the channel takes
    devices: frozenset[str] = frozenset({"cpu"})
    #: The channel takes operations in one order only, the same on every rank, as a communicator of NCCL or
    #: MPI does.  The group then gives it numbered operations and messages alone, and makes another channel
    #: for operations with a key, which it brings into the order in which rank 0 issues them.
    ordered: bool = False
    #: All members have to call :meth:`connect` before the first operation of the channel.
    collective: bool = False

    @abc.abstractmethod
    def submit(self, operation: Operation) -> Future[Any]:
        """Start ``operation`` and return at once.

        The future's value is what the user gets: ``outputs[0]`` for operations with one output,
        the list of outputs for several, ``None`` for none, and for RECV the
        tuple ``(tensor, source, tag)``.

        Numbered operations of a group are submitted in the same order on every rank and may run
        one after another; operations with a ``key`` are submitted in any order and must not wait
        for one another or for numbered ones.  Failures are exceptions of the future, of the
        :class:`~shoal.errors.GroupError` family.
        """

    def submit_all(self, operations: Sequence[Operation]) -> list[Future[Any]]:
        """Start several messages together, in order; as :meth:`submit` does each.

        For channels that have a way of their own to post many at once, or must (NCCL needs a send and a
        receive that wait for each other in one group).
        """
        return [self.submit(operation) for operation in operations]

    def connect(self, timeout: float) -> None:
        """Connect the members, if the channel is :attr:`collective`.

        Called once, in a thread of its own, when the first operation is submitted here: so it may wait for
        the other members, which do the same.  What is submitted meanwhile waits for its end.

        Args:
            timeout: of that operation, in seconds.

        Raises:
            GroupError: what went wrong; every operation of the group then fails with it.
        """

    def supports(self, kind: OpKind, dtype: torch.dtype | None, op: ReduceOp | None) -> bool:
        """Whether the channel can do this at all; what it cannot is refused in words before it is submitted.

        Args:
            dtype: of the tensors; None: there are none.
            op: the reduction; None: nothing is reduced.
        """
        return True

    def check(self, operation: Operation) -> None:
        """Refuse an operation that the channel cannot carry, because of its arguments.

        The group calls it before ``submit``, and for all operations of a batch before any of them is
        submitted, so that a refused batch has sent nothing.  A channel that carries whatever the
        group allows, which is the default, has nothing to say here.

        Raises:
            UsageError: what cannot be carried, and what to do instead.
        """

    def shortcut(self, lock: threading.Lock, recorder: FlightRecorder | None) -> Shortcut:
        """The group asks for this once, before its first call.

        Args:
            lock: held by who gives out a number; a shortcut submits nothing while another thread holds it.
            recorder: of the group; what a shortcut submits is recorded by it.
        """
        return NoShortcut()

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Uninitialised ``uint8`` memory on ``device`` that the channel can use without staging copies.

        Args:
            device: of one of the types in :attr:`devices`.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def failure(self) -> GroupError | None:
        """The error that broke the channel, or None.  Cheap; never blocks."""
        return None

    def report(self, failure: GroupError) -> None:
        """Note that a call has raised what ended the group."""
        self.reported = True

    def last_completed(self) -> int:
        """The number of the last collective that has completed here with all before it; -1: none is known."""
        return -1

    def fence(self, ranks: Sequence[int], timeout: float) -> list[int]:
        """See to it that lost ranks, should they live, write into no memory of this one any more.

        Args:
            ranks: without which the group goes on.
            timeout: in seconds.

        Returns:
            Those of which that is not certain.
        """
        return []

    def vote_limit(self) -> int:
        """The most bytes of a vote.

        Raises:
            UnsupportedOperation: the channel has no agreements, which is the default.
        """
        raise UnsupportedOperation("has no agreements")

    def agree(self, op: Op, value: bytes, timeout: float) -> Agreeing:
        """Vote in the next agreement of the group: the k-th call of a rank belongs to the k-th of each other.

        It works whatever became of the group, until this rank closes it, and needs neither the threads of
        Python nor the program: a rank that has not called it yet answers the others all the same.

        Args:
            op: ranks that call with different ones all get the decision DIFFERS, and none is left out by it.
            value: AND to SUM, GROW: an integer of 8 bytes; COMMON: such integers, ascending; GATHER, REBUILD:
                anything.
            timeout: in seconds, for the decision.

        Raises:
            UnsupportedOperation: the channel has no agreements, which is the default.
            GroupError: there are too many under way.
        """
        raise UnsupportedOperation("has no agreements")

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Fail every pending operation at once, here and on the peers; callable from any thread."""

    def begin_close(self) -> None:
        """Tell the peers that nothing more will be submitted here; :meth:`close` follows.  Never blocks.

        Groups that are closed one after another say so all at once, since others may close them in another
        order.  A channel that has nothing to say does nothing.
        """
        return

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """Flush what was sent, tell the peers, release everything.  Returns within ``timeout``.

        Raises:
            CollectiveMismatch: the members called different things, and no operation has said so here.
        """


@refuses_copies(
    "a backend",
    "connections to the other ranks",
    "Keep it outside of the object that you copy",
)
class Backend(abc.ABC):
    """Connects one process to its peers; makes a :class:`DataChannel` for each group."""

    name: ClassVar[str]
    #: the scopes of failures that its groups can have; see :class:`GroupSpec`
    scopes: ClassVar[frozenset[str]] = frozenset({"all"})

    #: Whether an operation has raised the loss of a rank.
    losses_reported: bool = False

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse values of options that cannot be right; called before anybody waits for anybody.

        Args:
            options: as the constructor will get them; their names are checked already.

        Raises:
            UsageError: what is wrong, and what was expected.
        """
        return

    @abc.abstractmethod
    def __init__(self, membership: Membership, *, timeout: float, **options: Any) -> None:
        """Connect to all ranks of the world; raises what went wrong, naming the rank."""

    @abc.abstractmethod
    def channel(self, group: GroupSpec) -> DataChannel:
        """The data channel of a new group.  Not collective: must not wait for the other members."""

    def hosts(self, ranks: Sequence[int]) -> list[int]:
        """For each of some ranks, numbered as this backend does, the number of its host: equal ones for ranks
        that die together with a machine, the same on every rank.  By default nothing is known of hosts."""
        return [0] * len(ranks)

    def lost(self) -> frozenset[int]:
        """The global ranks of all peers that are known to be dead or unreachable by now, for good.

        Peers count whose loss another rank has reported, and peers that left in good order do not.  The
        backend may ask the system which processes have died; it does not wait.  A backend that cannot tell
        returns an empty set.
        """
        return frozenset()

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """End all connections.  All channels have been closed before."""

    def program_ends(self) -> None:
        """Called when the program ends and has left groups open, before they are closed for it.

        A backend whose peers can be told tells them so with each channel that is closed from now on; an
        operation that lacks this rank then says why.
        """
        return

    def after_fork_in_child(self) -> None:
        """Called in a forked child: drop descriptors and memory that belong to the parent."""
