"""The elastic training session: its steps, its models, and its group, which shrinks and grows.

A step changes parameters only after its commit, and either all ranks commit it or none.  So after a failure
all surviving ranks hold the same parameters: nothing is rolled back, and only the notes of the rebuild are
sent.  New processes join between two steps, and receive the state from the other ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from copy import copy
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..common.copy_refusal import refuses_copies
from ..errors import GroupError, ShoalError, StateDiverged, StateLost, UsageError
from ..group import ProcessGroup
from ..group.rebuild import Regroupable
from ..parallel import DistributedDataParallel
from .commit import (
    BLOCK,
    NO_STATE,
    CommitExchange,
    CommitRecord,
    RankProgress,
    Requests,
    agree,
    divergence,
    num_completed_steps,
    was_interrupted,
)
from .membership.members import Resize, SessionMembers
from .sharded import ShardedOptimizer
from .state.state import State
from .state.transfer import receive_state, send_state
from .step import Attempt, Step
from .stragglers import Stragglers

_CLOSE_TIMEOUT_S = 5.0  # seconds to close the group of a program that failed


@refuses_copies(
    "a Session",
    "its group and threads",
    "Keep it outside of the object that you copy; its state can be saved with State.save()",
)
class Session:
    """Ranks that train together, and continue without the ranks that fail.

        with Session(state, min_size=2) as session:
            model = session.parallel(net)
            for step in session.steps(until=10_000):
                with step:
                    x, y = data[step.indices]
                    (loss_fn(model(x), y) * step.weight).backward()
                    step.commit()
                    opt.step()
                    opt.zero_grad()

    A rank whose block ends with an exception leaves the session; the others continue as after a failure.  A
    process with ``SHOAL_JOIN=1`` in its environment joins the session of its job.  With ``SHOAL_JOIN=auto``
    it starts a session if there is none.

    On SIGTERM a rank leaves at the end of the step, as after :meth:`leave`; a second SIGTERM has the effect
    it had before the session.  In a Slurm job SIGUSR1 works in the same way.

    Args:
        state: the state to train; the same on every rank.
        min_size: minimum number of ranks; with fewer, the surviving ranks raise TooFewRanks.
        max_size: maximum number of ranks that processes may join up to.  None: ``SHOAL_SESSION_SIZE``, which
            ``shoal run --spares`` sets, or no limit.
        active: number of ranks that share the samples.  The ranks above it are hot spares: they compute the
            same as another rank with a weight of 0, and replace ranks that fail.  None: all ranks share.
        group: the ranks to start with; it cannot be used after the session.  None: ``shoal.init()``, closed
            at the end of the block.

    Attributes:
        state, active: as above.
        group: the current ranks.  It is replaced when a rank is lost or leaves, and when processes join.  In
            a joining process it is a group of size 1 until the first step.
        events: every change of the group, in order.
    """

    def __init__(
        self,
        state: State,
        *,
        min_size: int = 1,
        max_size: int | None = None,
        active: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(state, State):
            raise UsageError(f"Session takes a shoal.elastic.State, got {type(state).__name__}")
        if not isinstance(min_size, int) or min_size < 1:
            raise UsageError(f"Session: min_size={min_size!r}: expected a positive integer")
        if max_size is not None and (not isinstance(max_size, int) or max_size < min_size):
            raise UsageError(
                f"Session: max_size={max_size!r}: expected a number from min_size={min_size}, or None"
            )
        if active is not None and (not isinstance(active, int) or active < 1):
            raise UsageError(f"Session: active={active!r}: expected a positive integer, or None")
        if active is not None and state.samples is None:
            raise UsageError("Session: active= needs samples to share: State(samples=Samples(...))")
        if group is not None and not isinstance(group, ProcessGroup):
            raise UsageError(f"Session: group must be a shoal.ProcessGroup, got {type(group).__name__}")
        self.state = state
        self.active = active
        self._members = SessionMembers(min_size, max_size, self._check_size, self._move_to)
        self.events = self._members.events
        self._initial_group, self._owns_group = group, group is None
        self._regroupables: list[Regroupable] = []
        #: the models whose parameters rank 0 broadcasts, and how many of them this rank has synchronised
        self._to_synchronise: list[DistributedDataParallel] = []
        self._synchronised = 0
        self._stragglers = Stragglers()
        self._callbacks: list[Callable[[Resize], None]] = []
        self._num_reported_events = 0
        self._step: Step | None = None
        self._attempt: Attempt | None = None
        #: number of completed blocks of ``attempts()``
        self._blocks = 0
        #: errors for the next steps of this rank, one each, which were interrupted on other ranks
        self._interruptions: list[GroupError] = []
        self._is_suspended = False
        self._hooks: list[RemovableHandle] = []
        #: Whether a commit in this group has compared the whole state; later ones compare only the samples.
        self._full_compare_done = False
        #: of the current group, from its first commit on
        self._table: CommitExchange | None = None
        #: Whether the current group still has to share the state.
        self._needs_sharing = False
        self._has_state = True
        self._sharded_optimizer = ShardedOptimizer(state.all_optimizers())

    @property
    def group(self) -> ProcessGroup:
        """The current ranks."""
        return self._members.group

    @property
    def position(self) -> int:
        """Number of completed steps and blocks of :meth:`attempts`."""
        return self.state.steps + self._blocks

    @property
    def left(self) -> bool:
        """Whether ``steps`` ended because this rank left, or because too many ranks left.

        The session ends on all ranks if fewer than ``min_size`` would remain.
        """
        return self._members.left

    @property
    def waiting(self) -> int:
        """Number of processes that wait to join, on rank 0; 0 on the other ranks."""
        return self._members.waiting

    @property
    def stragglers(self) -> tuple[int, ...]:
        """The ranks that computed for more than 1.5 times as long as the others, in the last 20 steps."""
        return self._stragglers.found

    def parallel(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """Wrap a model for data-parallel training; the wrapper is moved to each new group of the session.

        Every rank calls it.  It does not communicate: the parameters of rank 0 are broadcast, and the models
        compared, when the next step begins.  So a rank that fails meanwhile fails in a step.

        Args:
            module: a part of the state, or a module inside one.
            options: options of :class:`shoal.DistributedDataParallel`, except ``group``.

        Raises:
            UsageError: the module is not in the state, or it cannot be moved to another group.
        """
        if "group" in options:
            raise UsageError("session.parallel: leave group= out; the model uses the session's group")
        if not any(module is each for part in self.state.all_models() for each in part.modules()):
            raise UsageError(
                "session.parallel: the module is not part of the State: State(model=module, ...)"
            )
        synchronise = options.pop("init_sync", True)
        model = DistributedDataParallel(module, group=self.group, init_sync=False, **options)
        model.check_regroup()
        self._regroupables.append(model)
        if synchronise:
            self._to_synchronise.append(model)
        self._needs_sharing = True
        return model

    def on_resize(self, fn: Callable[[Resize], None]) -> None:
        """Call ``fn`` before the next step when the size of the group has changed.

        It is called on every rank except those that have just joined, for example to scale the learning rate
        where the batch changes with the group.
        """
        self._callbacks.append(fn)

    def leave(self) -> None:
        """Leave the session after the next commit: ``steps`` ends, and the other ranks continue.

        If fewer than ``min_size`` ranks would remain, ``steps`` ends on all ranks; the group stays usable.
        """
        self._members.leave_request.requested = True

    def steps(self, until: int | None = None) -> Iterator[Step]:
        """Yield the steps from ``state.steps`` on; a step in which a rank was lost may be repeated.

        The block of an interrupted step ends without an exception, on every rank, and ``step.committed`` is
        False after it.

        Args:
            until: number of completed steps at which to stop; None: no end.
        """
        while True:
            self.settle()
            if self.left or (until is not None and self.state.steps >= until):
                return
            if self._members.wait_for_min():
                if not self.left:
                    self._grow()
                continue
            if self._members.leavers:
                self._detach_gradients(keep=True)
                self._members.part(self.position, self.state.steps, self._sharded_optimizer.max_leavers)
                continue
            if self._members.admission_requested:
                self._grow()
            self._report_events()
            step = Step(self)
            yield step
            if not step.entered:
                raise UsageError(
                    f"step {step.number} was not used: the body of the loop must be `with step:`"
                )

    def attempts(self) -> Iterator[Attempt]:
        """Yield the runs of a block between two steps in which ranks communicate, such as an evaluation.

            for attempt in session.attempts():
                with attempt:
                    rank, size = session.group.rank, session.group.size
                    right = session.group.all_reduce(count_right(net, x[rank::size], y[rank::size])).wait()

        Every rank calls it after the same step, and only if ``step.committed``.  Usually the block runs once.
        If a rank is lost in it, the surviving ranks run it again in their new group, with the buffers and
        plain values of the state restored; gradients and other changes of the program are not restored.  When
        the loop ends, every surviving rank has completed the block.

        In a process that has not joined yet the block runs in a group of size 1.  A rank that has left the
        session gets no attempt.

        Raises:
            UsageError: called in the block of a step or of an attempt.
        """
        while not self._members.has_left:
            if not self._members.is_joining:
                self.settle()
            attempt = Attempt(self)
            yield attempt
            if not attempt.entered:
                raise UsageError("an attempt was not used: the body of the loop must be `with attempt:`")
            if attempt.counts:
                break
        if not self._members.is_joining and not self._members.has_left:
            self.settle()
            self._report_events()

    # -- calls of Step and Attempt -------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        self._step = step
        self._stragglers.begin(self._regroupables)
        if not self._full_compare_done:
            for each in self._regroupables:
                each.check_regroup()
        if self._interruptions:
            self._is_suspended = True
            self.group._submitter.suspend(self._interruptions[0])

    def exchange(self, step: Step) -> None:
        group, state = self.group, self.state
        samples = None if state.samples is None else state.samples.state_dict()
        same = repr((group.size, step.number, self.active, samples))
        seen = hashlib.blake2b(same.encode(), digest_size=16)
        if not self._full_compare_done:
            seen.update(state.digest())
        busy = self._stragglers.elapsed_s(self._regroupables)
        mine = CommitRecord.of(group.epoch, step.number, seen.digest(), self._members.own_requests(), busy)
        rows = self._exchange(mine, f"commit of step {step.number}")
        self._full_compare_done = True
        self._members.store_requests(rows)
        self._stragglers.add(rows, group.rank, lambda: group.stats().late)

    def begin_attempt(self, attempt: Attempt) -> None:
        if self._step is not None and self._step.in_block:
            raise UsageError("session.attempts() is for what happens between two steps, not in one")
        if self._attempt is not None and self._attempt.running:
            raise UsageError("session.attempts() was called in the block of an attempt")
        self._attempt = attempt

    def exchange_attempt_end(self) -> None:
        digest = hashlib.blake2b(repr(self.position).encode(), digest_size=16).digest()
        mine = CommitRecord.of(self.group.epoch, BLOCK, digest, Requests.NONE, 0.0)
        self._exchange(mine, f"end of a block of attempts() after {self.state.steps} steps")

    def count_attempt(self) -> None:
        self._blocks += 1

    def _exchange(self, mine: CommitRecord, what: str) -> list[CommitRecord]:
        if self._table is None:
            self._table = CommitExchange(self.group)
        rows = self._table.exchange(mine)
        if not agree(rows):
            raise divergence(rows, self.group, what, everything=not self._full_compare_done)
        return rows

    def recover(self, error: BaseException, progress: RankProgress) -> int | None:
        """Rebuild the group without the lost ranks; return the new position, or None if no rank is lost."""
        if not self._members.may_be_loss(error):
            return None
        if self._is_suspended:
            self._end_interruption()
            return progress.committed
        began = time.monotonic()
        if not self._has_state:
            progress = NO_STATE
        prepared = progress.prepared >= 0
        self._detach_gradients(keep=prepared or (self._step is not None and self._step.committed))
        before = self.group
        rebuilt = self._members.rebuild(progress, min(self._members.min_size, before.size))
        if not rebuilt.lost and not rebuilt.left:
            raise error  # caused by the program: a repetition would fail too
        notes = list(map(RankProgress.decode, rebuilt.notes.values()))
        counts = num_completed_steps(notes)
        if self._has_state and counts > progress.committed + prepared:
            raise StateDiverged(
                f"rank {before.rank} of group {before.name!r} has not reached the end of the step or block "
                f"after {self.state.steps} steps, and another rank has completed it"
            )
        again = was_interrupted(notes, counts, before.epoch)
        if again and not (progress.in_step and progress.committed == counts):
            assert isinstance(error, GroupError)
            self._interruptions.append(copy(error).with_traceback(None))
        number = counts - self._blocks if progress.in_step else self.state.steps
        self._members.add_event(number, before, began, rebuilt, again=again)
        return counts

    def _end_interruption(self) -> None:
        """Drop the backward pass of this step, and let the group communicate again."""
        self._is_suspended = False
        del self._interruptions[0]
        self.group._submitter.resume()
        self._detach_gradients(keep=False)
        for each in self._regroupables:
            if isinstance(each, DistributedDataParallel):
                each.regroup(self.group)

    # -- the block -----------------------------------------------------------------------------

    def __enter__(self) -> Session:
        members = self._members
        members.begin(self._initial_group)
        self._has_state = not members.is_joining
        try:
            if members.may_begin and self._sharded_optimizer.optimizer is not None:
                raise UsageError(
                    "SHOAL_JOIN=auto: the State has a ZeroRedundancyOptimizer, and the process that starts "
                    "the session would hold all of its state; start the first ranks with SHOAL_RANK and "
                    "SHOAL_SIZE, and the others with SHOAL_JOIN=1"
                )
            if not members.is_joining:
                members.check_size(self.group.size)
            self.group._channel.vote_limit()
            self._sharded_optimizer.begin(self.group, self, joins=members.is_joining)
        except BaseException:
            if self._owns_group:
                self.group.close()
            raise
        if self._sharded_optimizer.optimizer is not None:
            self._regroupables.append(self._sharded_optimizer.optimizer)
            self._needs_sharing = True
        self._hooks = [
            optimizer.register_step_pre_hook(self._refuse_early_step)
            for optimizer in self.state.all_optimizers()
        ]
        members.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._sharded_optimizer.end()
        try:
            if error is None and not self._members.is_joining and not self._members.has_left:
                self._end_together()
        finally:
            is_over = error is None and not self._members.has_left
            self._members.close(over=is_over)
            if not is_over:
                with contextlib.suppress(ShoalError):
                    self.group.close(_CLOSE_TIMEOUT_S)
            elif self._owns_group:
                self.group.close()

    def _end_together(self) -> None:
        """Wait until all ranks have ended: a rank in its last commit may need this rank for its rebuild."""
        while True:
            self.settle()
            try:
                self.group.barrier().wait()
                return
            except GroupError as error:
                if not self._members.may_be_loss(error):
                    raise
            try:
                self._members.rebuild(RankProgress(self.position), 1)
            except GroupError:
                return  # this rank has all completed steps, and the other ranks have ended

    # -- another group -------------------------------------------------------------------------

    def goes_on(self, error: GroupError) -> bool:
        if self._step is not None and self._step.running:
            return False  # the step is interrupted
        return self.recover(error, RankProgress(self.position)) is not None

    def settle(self) -> None:
        """Share the state in a new group: joined ranks receive it, and sharded state is redistributed."""
        if self._members.join():
            self._has_state = True
        while self._needs_sharing:
            try:
                self._share_state()
                self._sharded_optimizer.settle()
                self._needs_sharing = False
            except GroupError as error:
                if not self.goes_on(error):
                    raise
        self._members.release_old_groups()

    def _report_events(self) -> None:
        for event in self.events[self._num_reported_events :]:
            self._num_reported_events += 1
            for fn in self._callbacks:
                fn(event)

    def _share_state(self) -> None:
        group = self.group
        table = torch.empty(group.size, 3, dtype=torch.int64, device="cpu")
        mine = torch.tensor([[int(self._has_state), self._synchronised, self._blocks]], device="cpu")
        group.all_gather_single(table, mine).wait()
        holders = [rank for rank, (holds, _, _) in enumerate(table.tolist()) if holds]
        others = [rank for rank, (holds, _, _) in enumerate(table.tolist()) if not holds]
        if not holders:
            raise StateLost(
                f"rank {group.rank} of {group.size} joined a session, and all ranks that held its state were "
                "lost before they had sent it; start again from a checkpoint"
            )
        if self._has_state and others:
            send_state(self.state, group, holders, others)
        elif others:
            receive_state(self.state, group, holders)
            self._has_state, self._blocks = True, int(table[holders[0], 2])
        else:
            # After a loss, models that any rank has not synchronised are synchronised again on all ranks.
            for model in self._to_synchronise[int(table[:, 1].min()) :]:
                model.synchronise()
        self._synchronised = len(self._to_synchronise)

    def _grow(self) -> None:
        """Admit the processes that wait to join, if they are still there."""
        began, before = time.monotonic(), self.group
        grown = self._members.admit()
        if grown is None:
            return
        self._detach_gradients(keep=True)
        self._members.move_to(grown)
        index = len(self.events)
        self.settle()  # ranks may be lost in it
        self._members.add_event(self.state.steps, before, began, None, group=grown, index=index)

    def _move_to(self, group: ProcessGroup) -> None:
        """Move the models and the commit records to a new group."""
        self._needs_sharing, self._full_compare_done, self._table = True, False, None
        self._stragglers.reset()
        for each in self._regroupables:
            each.regroup(group)

    def _check_size(self, size: int) -> None:
        if self.state.samples is not None:
            self.state.samples.batch(size if self.active is None else min(self.active, size))

    # -- inside --------------------------------------------------------------------------------

    def _detach_gradients(self, *, keep: bool) -> None:
        """Copy the gradients out of the memory of the group, which is released with it, or drop them."""
        for model in self.state.all_models():
            for parameter in model.parameters():
                gradient = parameter.grad
                parameter.grad = gradient.clone() if keep and gradient is not None else None

    def _refuse_early_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._attempt is not None and self._attempt.running:
            raise UsageError(
                f"{type(optimizer).__name__} stepped in a block of attempts(), which is repeated if a rank "
                "is lost: change parameters in steps only"
            )
        if self._step is not None and self._step.running:
            raise UsageError(
                f"{type(optimizer).__name__} stepped before step.commit(): if a rank were lost now, the "
                "others could not know whether to repeat the step.  Call step.commit() first; optimisers "
                "that step in backward cannot be used"
            )
        self._sharded_optimizer.steps(optimizer, self._step)
