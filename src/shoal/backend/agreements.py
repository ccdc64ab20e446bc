"""What a data channel tells of an agreement, and asks for: see ``DataChannel.agree``."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol, TypeAlias

#: of a leader to the witness: its ballot, and what it proposes; None: it asks for a promise
WitnessRequest: TypeAlias = tuple[int, bytes | None]


class Op(enum.IntEnum):
    """How votes become one value; the numbers are those of ``cpp/agreement/decision.h``."""

    DIFFERS = 0  # only of a decision: the ranks called with different ones; its value has one byte for each
    AND = 1
    OR = 2
    MIN = 3
    MAX = 4
    SUM = 5
    COMMON = 6
    GATHER = 7
    REBUILD = 8  # as GATHER, of a call of ``rebuild``
    GROW = 9  # as AND, of ranks that take others in: waits for every rank that lives


class AgreementOutcome(enum.IntEnum):
    """What became of an agreement on this rank."""

    OPEN = 0
    DECIDED = 1
    LEFT_OUT = 2  # the others go on without this rank
    NO_QUORUM = 3  # the time is up
    CLOSED = 4  # this rank has closed the group


class News(NamedTuple):
    """What is known of an agreement.

    Attributes:
        op: of the decision, with its value and the ranks that go on (after DIFFERS: those whose ops the value
            has); None: there is none.
        request: for the witness, to be told once it is answered.
    """

    outcome: AgreementOutcome
    op: Op | None
    value: bytes
    ranks: tuple[int, ...]
    request: WitnessRequest | None


class Agreeing(Protocol):
    """An agreement in which this rank has voted.  Any thread may call it.

    Attributes:
        number: 0 for the first of the group, and so on; the same on all ranks.
    """

    number: int

    def wait(self, timeout: float) -> News:
        """Wait for an outcome or a request, for ``timeout`` seconds at most.  Each is given once."""

    def ask_witness(self, request: WitnessRequest, kept: bytes) -> bytes | None:
        """What the witness is to keep in the place of ``kept``; None: it refuses.

        Raises:
            ValueError: it cannot have kept that.
        """

    def tell_witness(self, request: WitnessRequest, kept: bytes) -> None:
        """Bring the answer of the witness, which had kept ``kept`` before it was asked."""

    def losses(self) -> tuple[list[int], list[int]]:
        """The members that this rank has lost, and those of them that it knows to be dead."""
