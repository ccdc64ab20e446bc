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
    """The interface of a session that an attempt uses."""

    def attempt_begins(self, attempt: Attempt) -> None:
        """Note that the block of ``attempt`` begins."""

    def exchange_after_block(self) -> None:
        """Wait until every rank has reached the end of the block.

        Raises GroupError, or StateDiverged if another rank is at another point of the program.
        """

    def attempt_counts(self) -> None:
        """Count a completed block."""


@refuses_copies("an Attempt", "its place in a session", "Copy what the block computes")
class Attempt:
    """One run of a block, from ``session.attempts()``; it is repeated if a rank is lost.

    Args:
        session: its session.

    Attributes:
        counts: whether all ranks have completed the block.
    """

    def __init__(self, session: AttemptOwner) -> None:
        self._session = session
        self.counts = False
        self._phase = "new"

    @property
    def entered(self) -> bool:
        """Whether the block has begun."""
        return self._phase != "new"

    @property
    def running(self) -> bool:
        """Whether the block is running."""
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
