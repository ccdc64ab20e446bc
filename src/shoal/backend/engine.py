"""The interface of engines that move only the data of collectives, such as an MPI library or NCCL.

The native backend supervises such an engine (see :mod:`shoal.backend.supervised`): it connects and
authenticates the ranks, matches and compares their calls, detects lost ranks, keeps deadlines, aborts and
agrees, and carries messages.  An engine consists of an :class:`Engine` for the process and a
:class:`Communicator` for each group.

An engine of the CPU moves the data of all collectives, and an engine of another device that of collectives
whose tensors are there.  Operations of an *early* engine are complete for the program as soon as their work
is enqueued on streams, and can be captured into graphs if it has :attr:`Engine.captures`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..rendezvous.membership import Membership
from ..spec import Operation, OpKind, ReduceOp
from .base import GroupSpec


class Transfer(abc.ABC):
    """The data of one operation on its way.  Different threads call it, one at a time.

    Attributes:
        events: of an early engine, once the work is enqueued: for each device, the stream on which it runs
            and an event after it.
    """

    events: Mapping[torch.device, tuple[Any, Any]] | None = None

    def launched(self) -> bool:
        """Continue to enqueue the work, without blocking; return whether it is enqueued.

        Called until it returns True; no later operation of the communicator is started before.  For early
        engines; the default returns True.

        Raises:
            Exception: as in :meth:`poll`.
        """
        return True

    @abc.abstractmethod
    def poll(self) -> bool:
        """Advance the transfer without blocking; return whether the outputs are complete.

        Not called again after it has returned True or raised.  Ctrl-C does not interrupt it.

        Raises:
            Exception: the transfer failed.  The group is then aborted with this error, unless the members
                called different operations: then with that.
        """


class Communicator(abc.ABC):
    """Moves the data of one group.  Every member makes one."""

    @abc.abstractmethod
    def start(self, operation: Operation) -> Transfer:
        """Start a collective without waiting for another rank.

        All ranks start the same collectives in the same order, also while transfers of earlier ones are
        incomplete.  Transfers are polled in this order: each one only when all earlier ones are complete.
        Different threads start collectives, one at a time, while another may poll.  BARRIER, SEND and RECV
        are not passed to an engine; operations of groups of one only to an engine of a device.

        On a device, the inputs are complete after the work on the current stream.  If ``operation.captured``,
        that stream captures a graph, and the work must be captured too: the transfer's events are waited for
        on streams of the capture, and the transfer is not polled.

        Raises:
            Exception: as in :meth:`Transfer.poll`.
        """

    def abort(self) -> bool:
        """End incomplete transfers of a group that has failed; called once, in a separate thread.

        The communicator is not closed afterwards.

        Returns:
            Whether no transfer accesses memory any more.  If not (the default), the tensors are kept until
            the process ends.
        """
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Release the communicator, all of whose transfers are complete, without waiting for another rank."""


class Setup(Protocol):
    """The means of a group to make a communicator for it."""

    spec: GroupSpec
    #: The device of the tensors; a group uses one device of an engine.
    device: torch.device

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """Return, on all members, the bytes that ``make`` returned on the first one: at most 1,000.

        Raises:
            GroupError: the group has failed.
        """

    def check(self) -> None:
        """Raise an error if the group has failed, so that the communicator is not needed.

        To be called every few milliseconds while the engine waits for other members.

        Raises:
            GroupError: the group has failed.
        """


class Engine(abc.ABC):
    """The engine of one process; constructed before the ranks are connected.

    Attributes:
        name: its name, for messages.
        device: the device type of the tensors that it moves.
        early: whether its operations are complete for the program when their work is enqueued.
        captures: whether an early engine supports captured operations.
        address: what other ranks must know about this one; they get it in :meth:`connect`.
    """

    name: str
    device: str = "cpu"
    early: bool = False
    captures: bool = False
    address: bytes = b""

    @abc.abstractmethod
    def __init__(self, membership: Membership) -> None:
        """Prepare the engine on this rank, without waiting for another.

        Raises:
            ConfigurationError: the engine cannot be used; the message says what to do.
        """

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Take the addresses of all ranks, in the order of their ranks, without waiting for another.

        Raises:
            RendezvousError: ranks cannot reach each other; raised on all of them.
        """
        return

    @abc.abstractmethod
    def communicator(self, setup: Setup) -> Communicator:
        """Make the communicator of a group.

        Called in a separate thread when all members have called the first operation, so it may wait for them.
        """

    def prepare_thread(self, device: torch.device) -> None:
        """Prepare a thread of the backend that will call transfers and communicators of ``device``."""
        return

    def supports(self, kind: OpKind, dtype: torch.dtype | None, op: ReduceOp | None) -> bool:
        """Whether the engine supports an operation, as in ``DataChannel.supports``."""
        return True

    def close(self, *, broken: bool) -> None:
        """Release the resources of the engine.

        Args:
            broken: whether transfers are incomplete.  The memory of their tensors is kept until the process
                ends.
        """
        return
