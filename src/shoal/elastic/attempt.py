"""A block between two steps in which ranks communicate, such as an evaluation."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from ..common.copy_refusal import refuses_copies
from ..errors import GroupError, UsageError
from . import step
from .progress import RankProgress
from .samples import seed_of


class AttemptOwner(step.StepOwner, Protocol):
    """The part of a session that an attempt uses: that of a step, and what follows."""

    def attempt_begins(self, attempt: Attempt) -> None:
        """The block of ``attempt`` begins."""

    def exchange_after_block(self) -> None:
        """Wait until every rank has come to the end of the block.

        Raises:
            GroupError: one is lost, or another error of the group.
            StateDiverged: another rank is elsewhere.
        """

    def attempt_counts(self) -> None:
        """A block counts."""


@refuses_copies("an Attempt", "its place in a session", "Copy what the block computes")
class Attempt:
    """One run of a block, from ``session.attempts()``: a lost rank ends it, and it comes again.

    Args:
        session: that it belongs to.

    Attributes:
        counts: whether the block is done, on this rank and all others.
    """

    def __init__(self, session: AttemptOwner) -> None:
        self._session = session
        self.counts = False
        self._phase = "new"

    @property
    def entered(self) -> bool:
        """Whether its block has begun."""
        return self._phase != "new"

    @property
    def running(self) -> bool:
        """Whether its block has begun and not ended."""
        return self._phase == "running"

    def __enter__(self) -> Attempt:
        if self.entered:
            raise UsageError("an attempt is used once: session.attempts() gives one for each run")
        session, state = self._session, self._session.state
        session.attempt_begins(self)
        state.hold()
        seed = 0 if state.samples is None else state.samples.seed
        step.seed_generators(seed_of(seed, "attempt", session.position, session.group.rank))
        self._phase = "running"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        session, position = self._session, self._session.position
        self._phase = "over"
        if error is None:
            error = self._failure_at_the_end()
            progress = RankProgress(position, position, session.group.epoch)
        else:
            progress = RankProgress(position)
        if error is not None:
            counted = session.recover(error, progress)
            if counted is None:
                if kind is None:
                    raise error
                return False
            if counted <= position:
                session.state.put_back(gradients=False)
                return True
        self.counts = True
        session.attempt_counts()
        return True

    def _failure_at_the_end(self) -> GroupError | None:
        try:
            self._session.exchange_after_block()
        except GroupError as error:
            return error
        return None
