"""The interfaces of backends and data channels.

A :class:`Backend` connects one process to its peers; a :class:`DataChannel` moves the tensors of one group.
:mod:`shoal.group` validates, numbers and records each call and passes it as an :class:`~shoal.spec.Operation`
to ``DataChannel.submit``, so a channel never gets a wrong shape, a non-contiguous tensor or a closed group.

Replaceable data channels follow ``DataChannel`` in the first design of torch.distributed.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from ..common.arguments import accepted_keywords, keyword_names, unknown_keyword_error
from ..common.copy_refusal import refuses_copies
from ..errors import GroupError, UnsupportedOperation
from ..future import Future
from ..recorder import FlightRecorder
from ..rendezvous.membership import Membership as Membership
from ..spec import FailureScope, Operation, OpKind, ReduceOp
from ..statistics import GroupStatistics
from .agreement import AgreementOp, PendingAgreement
from .identity import Tuning

if TYPE_CHECKING:
    from .registry import BackendFactory


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The description of one group for a backend.

    Attributes:
        name: unique in the job, equal on all members.
        ident: see :func:`~shoal.backend.identity.group_ident`.
        ranks: the members' ranks in the first group of the job, in group order; ``ranks[rank]`` is this
            process.
        tuning: how its operations are executed.
        options: options of the backend, as given to ``shoal.init``.
        scope: ALL: a failure between two members breaks the group; PAIR: it fails the messages between these
            two, and the group has no collectives.
        world_ranks: the members' ranks in the current world group, if that was rebuilt.
        for_callbacks: whether the channel is the second one of a group, for operations issued in callbacks.
        internal: whether a backend made the group for itself; traces do not show it.
    """

    name: str
    ident: int
    rank: int
    ranks: tuple[int, ...]
    tuning: Tuning = field(default_factory=Tuning)
    options: dict[str, Any] = field(default_factory=dict)
    scope: FailureScope = FailureScope.ALL
    world_ranks: tuple[int, ...] | None = None
    for_callbacks: bool = False
    internal: bool = False


class Shortcut(Protocol):
    """The numbering of a group's calls, and a fast path for common ones.

    Attributes:
        number: the number of the next collective.
        open: whether the group accepts calls.
        sends, receives: whether it takes these messages; the group sets them after the first of each.
    """

    number: int
    open: bool
    sends: bool
    receives: bool

    def submit(
        self,
        kind: OpKind,
        x: torch.Tensor | Sequence[torch.Tensor] | None,
        out: torch.Tensor | Sequence[torch.Tensor] | None,
        op: int,
        root: int,
        timeout: float,
    ) -> Future[Any] | None:
        """Submit, number and record a collective with at most one tensor, or list of tensors, each way.

        ``x``, ``out`` and ``timeout`` are the user's unvalidated arguments; ``x is out`` if the operation is
        in place.  ``op`` is the code of the reduction.

        Returns:
            None if the call is the first one, is made in a callback, or is unusual or invalid, or if the
            channel is broken.  Nothing was sent; the caller must validate and submit the call as usual.
        """

    def message(
        self, kind: OpKind, x: torch.Tensor | None, peer: int, tag: int, timeout: float
    ) -> Future[Any] | None:
        """Submit and record a SEND or RECV of one tensor; arguments and result as in :meth:`submit`."""

    def accepts(self, kind: OpKind, x: torch.Tensor | None, peer: int, tag: int, timeout: float) -> bool:
        """Whether the arguments are valid and such as :meth:`message` takes; it may still return None."""


class NoShortcut:
    """The shortcut of a channel without a fast path."""

    __slots__ = ("number", "open", "receives", "sends")

    def __init__(self) -> None:
        self.number = 0
        self.open = True
        self.sends = self.receives = False

    def submit(self, *call: object) -> None:
        """Return None."""

    message = submit

    def accepts(self, *call: object) -> bool:
        return False


@refuses_copies("a channel", "operations of a group", "Keep it outside of the object that you copy")
class DataChannel(abc.ABC):
    """Moves the tensors of one group."""

    #: Called, any number of times and from any thread, when a failed operation of a broken channel is
    #: detected.  Set by the group, which polls channels that do not call it.
    on_failure: Callable[[], None] | None = None
    #: Whether the error that broke the group was raised in the program.  True if the channel does not know.
    reported: bool = True
    #: Supported device types.
    devices: frozenset[str] = frozenset({"cpu"})
    #: Whether operations must be submitted in the same order on every rank, as for a communicator of NCCL or
    #: MPI.  The group then submits only numbered operations and messages here, and makes another channel for
    #: operations with a key, which it submits in the order in which rank 0 issues them.
    ordered: bool = False
    #: Whether all members must call :meth:`connect` before the first operation of the channel.
    collective: bool = False

    @abc.abstractmethod
    def submit(self, operation: Operation) -> Future[Any]:
        """Start ``operation`` and return at once.

        The future's value is the user's result: ``outputs[0]`` for operations with one output, the list of
        outputs for several, ``None`` for none, and ``(tensor, source, tag)`` for RECV.  A failure is a
        :class:`~shoal.errors.GroupError` of the future.

        Numbered operations of a group are submitted in the same order on every rank and may run one after
        another; operations with a ``key`` are submitted in any order and must not wait for one another or for
        numbered ones.
        """

    def submit_all(self, operations: Sequence[Operation]) -> list[Future[Any]]:
        """Start several messages together, in order, as if by :meth:`submit`.

        For channels that can post several at once, or must (NCCL: sends and receives that need each other).
        """
        return [self.submit(operation) for operation in operations]

    def keeps_order(self, operation: Operation) -> bool:
        """Whether ``operation`` must be submitted in the same order on every rank, if :attr:`ordered`."""
        return True

    def connect(self, timeout: float) -> None:
        """Connect the members, if the channel is :attr:`collective`.

        Called once, in a separate thread, when the first operation is submitted, so it may wait for the other
        members, which do the same.  Operations wait until it returns.

        Args:
            timeout: the timeout of the first operation, in seconds.

        Raises:
            GroupError: connecting failed; every operation of the group then fails with this error.
        """

    def supports(self, kind: OpKind, dtype: torch.dtype | None, op: ReduceOp | None) -> bool:
        """Whether the channel supports an operation; the group raises an error for unsupported ones.

        Args:
            dtype: the dtype of the tensors; None: there are none.
            op: the reduction; None: nothing is reduced.
        """
        return True

    def check(self, operation: Operation) -> None:
        """Check whether the channel supports the arguments of an operation.  The default accepts all.

        The group calls it before ``submit``, and for all operations of a batch before it submits any, so that
        a refused batch has sent nothing.

        Raises:
            UsageError: the operation is not supported; the message says what to do instead.
        """

    def captured(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a collective of these tensors would be captured into a graph of a device now.

        Its data then moves at each replay of the graph.  The group does not number it; see
        ``Operation.captured``.
        """
        return False

    def shortcut(self, lock: threading.Lock, recorder: FlightRecorder | None) -> Shortcut:
        """Return the fast path of the group.  Called once, before the first operation.

        Args:
            lock: held while a call is numbered; a shortcut submits nothing while another thread holds it.
            recorder: the group's flight recorder, for the operations that the shortcut submits.
        """
        return NoShortcut()

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Allocate uninitialised ``uint8`` memory that the channel can use without staging copies.

        Args:
            device: a device of a type in :attr:`devices`.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def failure(self) -> GroupError | None:
        """The error that broke the channel, or None.  Fast; never blocks."""
        return None

    def report(self, failure: GroupError) -> None:
        """Note that a call has raised ``failure``, the error that broke the group."""
        self.reported = True

    def last_completed(self) -> int:
        """The number of the last collective that has completed here with all before it; -1 if unknown."""
        return -1

    def statistics(self) -> GroupStatistics:
        """Return counters of the operations of this rank.  Never blocks.

        Raises:
            UnsupportedOperation: the channel counts nothing (the default).
        """
        raise UnsupportedOperation("has no statistics")

    def fence(self, ranks: Sequence[int], timeout: float) -> list[int]:
        """Ensure that lost ranks, if they still run, no longer write into memory of this rank.

        Args:
            ranks: the ranks that the group evicts.
            timeout: in seconds.

        Returns:
            The ranks for which this could not be ensured.
        """
        return []

    def vote_limit(self) -> int:
        """The maximum size of a vote, in bytes.

        Raises:
            UnsupportedOperation: the channel has no agreements (the default).
        """
        raise UnsupportedOperation("has no agreements")

    def agree(self, op: AgreementOp, value: bytes, timeout: float) -> PendingAgreement:
        """Vote in the next agreement of the group; the k-th calls of all ranks belong together.

        Agreements work on a broken group too, until this rank closes it.  They need no Python thread: a rank
        that has not called ``agree`` yet answers the others nevertheless.

        Args:
            op: if ranks vote with different ops, all get the decision DIFFERS and none is evicted.
            value: AND to SUM, GROW: an integer of 8 bytes; COMMON: such integers, ascending; GATHER, REBUILD:
                any bytes.
            timeout: seconds until the decision.

        Raises:
            UnsupportedOperation: the channel has no agreements (the default).
            GroupError: too many agreements are pending.
        """
        raise UnsupportedOperation("has no agreements")

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Fail every pending operation at once, here and on the peers; callable from any thread."""

    def begin_close(self) -> None:
        """Notify the peers that this rank submits nothing more; :meth:`close` follows.  Never blocks.

        Called first for all groups to be closed, since other ranks may close them in another order.
        """
        return

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """Flush sent data, notify the peers and release all resources, within ``timeout`` seconds.

        Raises:
            CollectiveMismatch: the members called different operations, and this was not raised before.
        """


@refuses_copies("a backend", "connections to the other ranks", "Keep it outside of the object that you copy")
class Backend(abc.ABC):
    """Connects one process to its peers; makes a :class:`DataChannel` for each group."""

    name: ClassVar[str]
    #: Supported values of ``GroupSpec.scope`` (:class:`~shoal.spec.FailureScope`).
    scopes: ClassVar[frozenset[str]] = frozenset({FailureScope.ALL})
    #: URL of the rendezvous if neither the program nor the environment names a store; None: ``env://``.
    default_url: ClassVar[str | None] = None

    #: Whether an operation has raised an error for the loss of a rank.
    losses_reported: bool = False

    @classmethod
    def option_names(cls) -> list[str] | None:
        """Return the names of the options: keywords of the constructor, and if that passes on others
        (``**options``), of the constructors that it inherits; None: any name.
        """
        names: list[str] = []
        for each in cls.__mro__:
            if "__init__" in vars(each):
                constructor = vars(each)["__init__"]
                found = keyword_names(constructor)
                names += [name for name in found if name not in ("membership", "timeout", *names)]
                if accepted_keywords(constructor) is not None:
                    return names
        return None

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Validate the values of options, before any process waits for another.

        Args:
            options: the options for the constructor; their names are already checked.

        Raises:
            UsageError: a value is invalid.
        """
        return

    @abc.abstractmethod
    def __init__(self, membership: Membership, *, timeout: float, **options: Any) -> None:
        """Connect to all ranks of the world, within ``timeout`` seconds; errors name the rank."""

    @abc.abstractmethod
    def channel(self, group: GroupSpec) -> DataChannel:
        """Make the data channel of a new group.  Not collective: must not wait for the other members."""

    def hosts(self, ranks: Sequence[int]) -> list[int]:
        """Return for each rank (numbered as in this backend) the number of its host, the same on every rank.

        Ranks with equal numbers fail together with a machine.  The default returns 0 for all.
        """
        return [0] * len(ranks)

    def totals(self) -> GroupStatistics | None:
        """Counters of all groups so far, with global ranks; None if the backend counts nothing.

        Backends that connect members of a group once more count for the one that connects all ranks.
        """
        return None

    def status_page(self) -> object:
        """The engine whose status page also shows groups with a backend of their own; None: there is none."""
        return None

    def lost(self) -> frozenset[int]:
        """The global ranks of all lost peers, including those that other ranks reported; none that left.

        Does not wait, but may query the system for ended processes.  Empty if the backend does not know.
        """
        return frozenset()

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """End all connections.  All channels have been closed before."""

    def program_ends(self) -> None:
        """Called when the program ends with open groups, before these are closed.

        A backend can pass this on to the peers, so that errors of operations that wait for this rank name it.
        """
        return

    def after_fork_in_child(self) -> None:
        """Release descriptors and memory that belong to the parent.  Called in a forked child."""


def check_options(
    factory: BackendFactory, options: Mapping[str, Any], where: str, others: Sequence[str]
) -> None:
    """Raise UsageError if an option of a backend is unknown or its value is invalid.

    Args:
        where: the called function, for the message.
        others: the other arguments of that function.
    """
    backend = factory if isinstance(factory, type) and issubclass(factory, Backend) else None
    known = accepted_keywords(factory) if backend is None else backend.option_names()
    if known is not None:
        names = [name for name in known if name not in ("membership", "timeout")]
        if unknown := [name for name in options if name not in names]:
            raise unknown_keyword_error(where, unknown, [*others, *names])
    if backend is not None:
        backend.check_options(options)
