"""The types of agreements between the members of a group: see ``DataChannel.agree``."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from ..spec import TextEnum


class WitnessRequest(NamedTuple):
    """A leader's request to the witness.

    Attributes:
        ballot: of the leader.
        proposal: the decision that it proposes; None: it asks for a promise.
    """

    ballot: int
    proposal: bytes | None


class AgreementOp(TextEnum):
    """The operation that makes one value of the votes."""

    DIFFERS = "differs"  # only of a decision: the ranks called with different ones
    AND = "and"
    OR = "or"
    MIN = "min"
    MAX = "max"
    SUM = "sum"
    COMMON = "common"
    GATHER = "gather"
    REBUILD = "rebuild"  # as GATHER, for a call of ``rebuild``
    GROW = "grow"  # as AND, for ranks that admit others: waits for every surviving rank


class AgreementOutcome(enum.Enum):
    """The outcome of an agreement on this rank."""

    OPEN = enum.auto()
    DECIDED = enum.auto()
    LEFT_OUT = enum.auto()  # the others continue without this rank
    NO_QUORUM = enum.auto()  # the timeout expired
    CLOSED = enum.auto()  # this rank has closed the group


class AgreementState(NamedTuple):
    """The current state of an agreement.

    Attributes:
        op: of the decision; None: there is none.
        value: of the decision.
        called: if ``op`` is DIFFERS, the operation that each of ``ranks`` called.
        ranks: of the decision: the ranks that continue.
        request: for the witness; its answer goes to :meth:`PendingAgreement.tell_witness`.
    """

    outcome: AgreementOutcome
    op: AgreementOp | None
    value: bytes
    called: tuple[AgreementOp, ...]
    ranks: tuple[int, ...]
    request: WitnessRequest | None


class PendingAgreement(Protocol):
    """An agreement in which this rank has voted.  Thread-safe.

    Attributes:
        number: the index of the agreement in its group, from 0; equal on all ranks.
    """

    number: int

    def wait(self, timeout: float) -> AgreementState:
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
