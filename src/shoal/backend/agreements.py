"""The types of agreements between the members of a group: see ``DataChannel.agree``."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol


class WitnessRequest(NamedTuple):
    """A leader's request to the witness.

    Attributes:
        ballot: of the leader.
        proposal: the decision that it proposes; None: it asks for a promise.
    """

    ballot: int
    proposal: bytes | None


class Op(enum.Enum):
    """The operation that makes one value of the votes."""

    DIFFERS = enum.auto()  # only of a decision: the ranks called with different ones
    AND = enum.auto()
    OR = enum.auto()
    MIN = enum.auto()
    MAX = enum.auto()
    SUM = enum.auto()
    COMMON = enum.auto()
    GATHER = enum.auto()
    REBUILD = enum.auto()  # as GATHER, for a call of ``rebuild``
    GROW = enum.auto()  # as AND, for ranks that admit others: waits for every surviving rank


class AgreementOutcome(enum.Enum):
    """The outcome of an agreement on this rank."""

    OPEN = enum.auto()
    DECIDED = enum.auto()
    LEFT_OUT = enum.auto()  # the others continue without this rank
    NO_QUORUM = enum.auto()  # the timeout expired
    CLOSED = enum.auto()  # this rank has closed the group


class News(NamedTuple):
    """The current state of an agreement.

    Attributes:
        op: of the decision; None: there is none.
        value: of the decision.
        called: if ``op`` is DIFFERS, the operation that each of ``ranks`` called.
        ranks: of the decision: the ranks that continue.
        request: for the witness; its answer goes to :meth:`Agreeing.tell_witness`.
    """

    outcome: AgreementOutcome
    op: Op | None
    value: bytes
    called: tuple[Op, ...]
    ranks: tuple[int, ...]
    request: WitnessRequest | None


class Agreeing(Protocol):
    """An agreement in which this rank has voted.  Thread-safe.

    Attributes:
        number: the index of the agreement in its group, from 0; equal on all ranks.
    """

    number: int

    def wait(self, timeout: float) -> News:
        """Wait for an outcome or a request, for at most ``timeout`` seconds.  Each is returned once."""

    def ask_witness(self, request: WitnessRequest, kept: bytes) -> bytes | None:
        """Return the witness's new record after ``request``, given its record ``kept``; None: it refuses.

        Raises:
            ValueError: ``kept`` is not a valid record.
        """

    def tell_witness(self, request: WitnessRequest, kept: bytes) -> None:
        """Pass on the answer of the witness, whose record was ``kept`` before the request."""

    def losses(self) -> tuple[list[int], list[int]]:
        """The members that this rank has lost, and the subset whose processes are known to have ended."""
