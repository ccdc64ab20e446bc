"""One step of training: its samples, and the exchange after which it counts."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Protocol

import torch

from ..common.copy_refusal import refuses_copies
from ..errors import GroupError, UsageError
from ..group import ProcessGroup
from .progress import RankProgress
from .samples import Samples, SampleShare, seed_of
from .state.state import State


class StepOwner(Protocol):
    """The part of a session that a step uses."""

    state: State
    active: int | None

    @property
    def position(self) -> int:
        """How many steps, and blocks of ``attempts()`` between them, count."""

    @property
    def group(self) -> ProcessGroup:
        """The ranks that live."""

    def begins(self, step: Step) -> None:
        """The block of ``step`` begins."""

    def exchange(self, step: Step) -> None:
        """Wait until every rank has called ``commit``.

        Raises:
            GroupError: one is lost, or another error of the group.
            StateDiverged: the ranks have not done the same so far.
        """

    def recover(self, error: BaseException, progress: RankProgress) -> int | None:
        """Go on without the ranks that are lost.

        Returns:
            The new ``position``.  None: ``error`` tells of no lost rank, and nothing was done.

        Raises:
            GroupError: the survivors cannot go on.
        """


@refuses_copies(
    "a Step",
    "its place in a session",
    "Copy step.number and step.indices",
)
class Step:
    """One step, from ``session.steps()``: a block that a lost rank ends, and that comes again.

    Args:
        session: that it belongs to.

    Attributes:
        number: of the step, from 0.
        position: of the step among all steps and blocks of the session.
        committed: whether it counts.
    """

    def __init__(self, session: StepOwner) -> None:
        self._session = session
        self.number = session.state.steps
        self.position = session.position
        self.committed = False
        self._share: SampleShare | None = None
        self._phase = "new"

    @property
    def samples(self) -> Samples:
        """The samples of the state."""
        samples = self._session.state.samples
        if samples is None:
            raise UsageError("the State of this session has no samples: State(samples=Samples(...))")
        return samples

    @property
    def share(self) -> SampleShare:
        """What this rank takes of the samples: :attr:`indices`, :attr:`weight`, and of which group."""
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
        """What to multiply this rank's mean loss by, so that the average over ranks is that of the batch.

        0.0 in a hot spare: its gradients are zeros.
        """
        return self.share.weight

    @property
    def entered(self) -> bool:
        """Whether its block has begun."""
        return self._phase != "new"

    @property
    def running(self) -> bool:
        """Whether its block has begun, and it does not count yet."""
        return self._phase == "running" and not self.committed

    @property
    def in_block(self) -> bool:
        """Whether its block has begun and not ended."""
        return self._phase in ("running", "lost")

    def commit(self) -> None:
        """Wait until every rank has all averaged gradients; then the step counts.

        Called once in each step, after backward and before the optimiser.  When it returns, the step counts
        on every survivor, also if a rank died meanwhile.  If it does not count, the block ends.

        Raises:
            StateDiverged: on every rank; they have not done the same so far.
            UsageError: it is called outside of the block, or twice.
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
            counts = self._session.recover(error, RankProgress(self.position, self.position, group.epoch))
            if counts is None:
                raise
            if counts <= self.position:
                self._phase = "lost"
                state.put_back()
                raise
        state.step_counts(0 if self._share is None else self._share.batch)
        self.committed = True

    def __enter__(self) -> Step:
        if self.entered:
            raise UsageError(f"step {self.number} has been used: session.steps() gives one for each block")
        self._phase = "running"
        self._session.begins(self)
        # Blocks may have counted, and ranks may have been lost, since the step was made.
        self.position = self._session.position
        self._share = None
        if self._session.state.samples is not None:
            self.share  # noqa: B018 - of this group, whatever becomes of it
        self._session.state.hold()
        self._seed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        phase, self._phase = self._phase, "over"
        if error is None:
            if not self.committed:
                raise UsageError(
                    f"step {self.number} on rank {self._session.group.rank} ended without step.commit(): "
                    "call it after backward and before the optimiser's step"
                )
            return False
        if phase == "lost":
            return isinstance(error, GroupError)
        if self.committed:
            return False
        state = self._session.state
        if self._session.recover(error, RankProgress(self.position)) is None:
            return False
        state.put_back()
        return True

    def _seed(self) -> None:
        """Begin random numbers anew: a step that comes again draws what it drew before."""
        state = self._session.state
        seed = 0 if state.samples is None else state.samples.seed
        rank = self._session.group.rank if self._share is None else self._share.rank
        seed_generators(seed_of(seed, "step", self.number, rank))


def seed_generators(seed: int) -> None:
    """Begin the random numbers of torch and Python anew."""
    # torch.manual_seed writes down a traceback for each kind of device that there may be.
    torch.default_generator.manual_seed(seed)
    for devices in (torch.cuda, torch.xpu):
        if devices.is_initialized():
            devices.manual_seed_all(seed)
    random.seed(seed)
