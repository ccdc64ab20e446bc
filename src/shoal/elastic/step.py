"""The blocks of a session, repeated if a rank is lost: training steps, and attempts between them."""

from __future__ import annotations

import enum
import random
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ..common.copy_refusal import refuses_copies
from ..errors import GroupError, UsageError
from .commit import RankProgress
from .samples import Samples, SampleShare, seed_of

if TYPE_CHECKING:
    from .session import Session


class BlockPhase(enum.Enum):
    """The state of a block."""

    NEW = enum.auto()
    RUNNING = enum.auto()
    LOST = enum.auto()  #: a rank was lost in the commit, and the step will be repeated
    ENDED = enum.auto()


@refuses_copies("a Step", "its place in a session", "Copy step.number and step.indices")
class Step:
    """One step, from ``session.steps()``; its block is repeated if a rank is lost before the commit.

    Attributes:
        number: the number of the step, from 0.
        position: its index among all steps and blocks of ``attempts()`` of the session.
        committed: whether the step is completed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.number = session.state.steps
        self.position = session.position
        self.committed = False
        self._share: SampleShare | None = None
        self._phase = BlockPhase.NEW

    @property
    def samples(self) -> Samples:
        """The samples of the state."""
        samples = self._session.state.samples
        if samples is None:
            raise UsageError("the State of this session has no samples: State(samples=Samples(...))")
        return samples

    @property
    def share(self) -> SampleShare:
        """This rank's share of the samples: :attr:`indices`, :attr:`weight`, and the ranks that share."""
        if self._share is None:
            group = self._session.group
            self._share = self.samples.share(group.rank, group.size, active=self._session.active)
        return self._share

    @property
    def indices(self) -> torch.Tensor:
        """The samples of this rank in this step, ``int64``."""
        return self.share.indices

    @property
    def weight(self) -> float:
        """Factor for this rank's mean loss, so that the average over all ranks is the mean over the batch.

        0.0 on a hot spare: its gradients are zeros.
        """
        return self.share.weight

    @property
    def entered(self) -> bool:
        """Whether the block has begun."""
        return self._phase is not BlockPhase.NEW

    @property
    def running(self) -> bool:
        """Whether the block has begun, and the step is not committed yet."""
        return self._phase is BlockPhase.RUNNING and not self.committed

    @property
    def in_block(self) -> bool:
        """Whether the block has begun and not ended."""
        return self._phase in (BlockPhase.RUNNING, BlockPhase.LOST)

    def commit(self) -> None:
        """Wait until every rank has all averaged gradients; then the step is completed.

        Call it once in each step, after backward and before the optimiser's step.  When it returns, the step
        is completed on every surviving rank, even if a rank failed meanwhile.  Otherwise it ends the block
        with an exception, and the session repeats the step.

        Raises:
            StateDiverged: on every rank; they have not executed the same steps or hold different states.
            UsageError: called outside the block, or twice.
        """
        if not self.running:
            raise UsageError(
                f"step {self.number} on rank {self._session.group.rank}: commit() is called once, in the "
                "block of the step"
            )
        state, group = self._session.state, self._session.group
        try:
            self._session.exchange(self)
        except GroupError as error:
            progress = RankProgress(self.position, self.position, group.epoch, in_step=True)
            counts = self._session.recover(error, progress)
            if counts is None:
                raise
            if counts <= self.position:
                self._phase = BlockPhase.LOST
                state.put_back()
                raise
        state.step_counts(0 if self._share is None else self._share.batch)
        self.committed = True

    def __enter__(self) -> Step:
        if self.entered:
            raise UsageError(f"step {self.number} has been used: session.steps() gives one for each block")
        self._phase = BlockPhase.RUNNING
        self._session.begin_step(self)
        # Since the step was made, blocks may have been completed, and ranks may have been lost.
        self.position = self._session.position
        self._share = None
        if self._session.state.samples is not None:
            self.share  # noqa: B018 - computed for this group, even if it changes during the step
        self._session.state.hold()
        self._seed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        phase, self._phase = self._phase, BlockPhase.ENDED
        if error is None:
            if not self.committed:
                raise UsageError(
                    f"step {self.number} on rank {self._session.group.rank} ended without step.commit(): "
                    "call it after backward and before the optimiser's step"
                )
            return False
        if phase is BlockPhase.LOST:
            return isinstance(error, GroupError)
        if self.committed:
            return False
        progress = RankProgress(self.position, epoch=self._session.group.epoch, in_step=True)
        if self._session.recover(error, progress) is None:
            return False
        self._session.state.put_back()
        return True

    def _seed(self) -> None:
        """Seed the random generators, so that a repeated step draws the same numbers."""
        state = self._session.state
        seed = 0 if state.samples is None else state.samples.seed
        rank = self._session.group.rank if self._share is None else self._share.rank
        seed_generators(seed_of(seed, "step", self.number, rank))


def seed_generators(seed: int) -> None:
    """Seed the random generators of torch and Python."""
    # torch.manual_seed formats a stack trace for each device type that is not initialised.
    torch.default_generator.manual_seed(seed)
    for devices in (torch.cuda, torch.xpu):
        if devices.is_initialized():
            devices.manual_seed_all(seed)
    random.seed(seed)


@refuses_copies("an Attempt", "its place in a session", "Copy what the block computes")
class Attempt:
    """One run of a block, from ``session.attempts()``; it is repeated if a rank is lost.

    Attributes:
        counts: whether all ranks have completed the block.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.counts = False
        self._phase = BlockPhase.NEW

    @property
    def entered(self) -> bool:
        """Whether the block has begun."""
        return self._phase is not BlockPhase.NEW

    @property
    def running(self) -> bool:
        """Whether the block is running."""
        return self._phase is BlockPhase.RUNNING

    def __enter__(self) -> Attempt:
        if self.entered:
            raise UsageError("an attempt is used once: session.attempts() gives one for each run")
        session, state = self._session, self._session.state
        session.begin_attempt(self)
        state.hold()
        seed = 0 if state.samples is None else state.samples.seed
        seed_generators(seed_of(seed, "attempt", session.position, session.group.rank))
        self._phase = BlockPhase.RUNNING
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        session, position = self._session, self._session.position
        self._phase = BlockPhase.ENDED
        progress = RankProgress(position)
        if error is None:
            progress = RankProgress(position, position, session.group.epoch)
            try:
                session.exchange_attempt_end()
            except GroupError as failure:
                error = failure
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
        session.count_attempt()
        return True
