"""The interface of engines that move only the data of collectives, such as an MPI library.

The native backend supervises such an engine (see :mod:`shoal.backend.supervised`): it connects and
authenticates the ranks, matches and compares their calls, detects lost ranks, keeps deadlines, aborts and
agrees, and carries messages.  An engine consists of an :class:`Engine` for the process and a
:class:`Communicator` for each group.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol

import torch

from ..rendezvous.membership import Membership
from ..spec import Operation, OpKind, ReduceOp
from .base import GroupSpec


class Transfer(Protocol):
    """The data of one operation on its way.  Different threads call it, one at a time."""

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
        are not passed to an engine, nor operations of groups of one.

        Raises:
            Exception: as in :meth:`Transfer.poll`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release the communicator, all of whose transfers are complete, without waiting for another rank."""


class Engine(abc.ABC):
    """The engine of one process; constructed before the ranks are connected.

    Attributes:
        name: its name, for messages.
        address: what other ranks must know about this one; they get it in :meth:`connect`.
    """

    name: str
    address: bytes = b""

    @abc.abstractmethod
    def __init__(self, membership: Membership) -> None:
        """Prepare the engine on this rank, without waiting for another.

        Raises:
            ConfigurationError: the engine cannot be used; the message says what to do.
        """

    @abc.abstractmethod
    def connect(self, addresses: Sequence[bytes]) -> None:
        """Take the addresses of all ranks, in the order of their ranks, without waiting for another.

        Raises:
            RendezvousError: ranks cannot reach each other; raised on all of them.
        """

    @abc.abstractmethod
    def communicator(self, spec: GroupSpec) -> Communicator:
        """Make the communicator of a group of several ranks.

        Called in a separate thread when all members have called the first operation, so it may wait for them.
        """

    def supports(self, kind: OpKind, dtype: torch.dtype | None, op: ReduceOp | None) -> bool:
        """Whether the engine supports an operation, as in ``DataChannel.supports``."""
        return True

    def progress(self) -> None:
        """Send what earlier transfers have left in buffers.  Called often, in a separate thread."""
        return

    def close(self, *, broken: bool) -> None:
        """Release the resources of the engine.

        Args:
            broken: whether transfers are incomplete.  The memory of their tensors is kept until the process
                ends.
        """
        return
