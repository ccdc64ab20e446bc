"""Training that goes on through deaths: the steps, the models, and the group that shrinks and grows.

A step changes parameters only after its commit, and every rank commits it or none does.  So survivors of a
death hold the same parameters: nothing is rolled back, and nothing is sent but the notes of the rebuild.
Newcomers join between two steps; then they receive the state from all the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..common.copy_refusal import refuses_copies
from ..errors import GroupError, ShoalError, StateDiverged, StateLost, UsageError
from ..group import ProcessGroup
from ..group.regroup import Regroupable
from ..parallel import DistributedDataParallel
from .attempt import Attempt
from .membership.members import SessionMembers
from .progress import NOTHING, RankProgress, steps_that_count
from .record import BLOCK, CommitRecord, CommitTable, Wish, agree, divergence
from .resize import Resize
from .sharded import Sharded
from .state.state import State
from .state.transfer import receive_state, send_state
from .step import Step
from .stragglers import Stragglers

_LEAVING = 5.0  # seconds for closing the group of a program that fails


@refuses_copies(
    "a Session",
    "its group and threads",
    "Keep it outside of the object that you copy; its state can be saved with State.save()",
)
class Session:
    """Ranks that train together, and go on without those that die.

        with Session(state, min=2) as session:
            model = session.parallel(net)
            for step in session.steps(until=10_000):
                with step:
                    x, y = data[step.indices]
                    (loss_fn(model(x), y) * step.weight).backward()
                    step.commit()
                    opt.step()
                    opt.zero_grad()

    A rank whose program leaves the block by an exception leaves the training; the others go on as after a
    death.  A process with ``SHOAL_JOIN=1`` in its environment joins the session that runs at its place; with
    ``SHOAL_JOIN=auto`` it begins one if there is none, and the others join that.

    SIGTERM makes a rank leave at the end of the step, as :meth:`leave` does; a second one does what it did
    before.  Within a job of Slurm, SIGUSR1 does too.

    Args:
        state: what is trained; the same on every rank.
        min: with fewer ranks the survivors raise TooFewRanks.
        max: no process joins so many ranks; None: as many as ``SHOAL_SESSION_SIZE`` says, which ``shoal run
            --spares`` sets, or as many as come.
        active: so many ranks share the samples; those above are hot spares, which compute what others do
            with a weight of 0, and take the places of ranks that die.  None: all share them.
        group: the ranks; the session uses it up.  None: ``shoal.init()``, closed at the end of the block.

    Attributes:
        state: what is trained.
        active: how many ranks share the samples, if so many live; None: all.
        group: the ranks that live, a new group after every death and whenever processes have joined.  In a
            process that joins it is a group of one until the first step.
        events: every change of the group, in order.
    """

    def __init__(
        self,
        state: State,
        *,
        min: int = 1,
        max: int | None = None,
        active: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(state, State):
            raise UsageError(f"Session takes a shoal.elastic.State, got {type(state).__name__}")
        if not isinstance(min, int) or min < 1:
            raise UsageError(f"Session: min={min!r}: expected a positive integer")
        if max is not None and (not isinstance(max, int) or max < min):
            raise UsageError(f"Session: max={max!r}: expected a number from min={min}, or None")
        if active is not None and (not isinstance(active, int) or active < 1):
            raise UsageError(f"Session: active={active!r}: expected a positive integer, or None")
        if active is not None and state.samples is None:
            raise UsageError("Session: active= needs samples to share: State(samples=Samples(...))")
        if group is not None and not isinstance(group, ProcessGroup):
            raise UsageError(f"Session: group must be a shoal.ProcessGroup, got {type(group).__name__}")
        self.state = state
        self.active = active
        self._members = SessionMembers(min, max, self._check_size, self._follow)
        self.events = self._members.events
        self._given, self._own = group, group is None
        self._following: list[Regroupable] = []
        #: the models that begin with what rank 0 holds, and how many of them have done so here
        self._to_synchronise: list[DistributedDataParallel] = []
        self._synchronised = 0
        self._stragglers = Stragglers()
        self._callbacks: list[Callable[[Resize], None]] = []
        self._told = 0
        self._step: Step | None = None
        self._attempt: Attempt | None = None
        #: how many blocks of ``attempts()`` count, in all of the session
        self._blocks = 0
        self._hooks: list[RemovableHandle] = []
        #: The first commit in a group compares everything; later ones what was dealt.
        self._compared = False
        #: of the present group, from its first commit on
        self._table: CommitTable | None = None
        #: Whether nothing has been done yet in the present group.
        self._is_new = False
        self._holds_state = True
        self._sharded = Sharded(state.all_optimizers())

    @property
    def group(self) -> ProcessGroup:
        """The ranks that live."""
        return self._members.group

    @property
    def position(self) -> int:
        """How many steps, and blocks of :meth:`attempts` between them, count."""
        return self.state.steps + self._blocks

    @property
    def left(self) -> bool:
        """Whether the steps came to their end because this rank has left, or because all end.

        All do when fewer than ``min`` would train on without those that were told to leave.
        """
        return self._members.left

    @property
    def waiting(self) -> int:
        """How many processes wait to join, as rank 0 knows; 0 on the other ranks."""
        return self._members.waiting

    @property
    def stragglers(self) -> tuple[int, ...]:
        """The ranks that computed more than 1.5 times as long as the others, in the last 20 steps."""
        return self._stragglers.found

    def parallel(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """Wrap a model; the wrapped one follows the session from group to group.

        Every rank calls it.  It sends nothing: ranks begin with what rank 0 holds, and compare their models,
        when the next step begins, so that a rank which dies meanwhile is one that dies in a step.

        Args:
            module: a part of the state, or a module inside one.
            options: those of :class:`shoal.DistributedDataParallel`, but for ``group``.

        Raises:
            UsageError: the module is not in the state, or what it carries cannot follow.
        """
        if "group" in options:
            raise UsageError("session.parallel: the group is that of the session; leave group= out")
        if not any(module is each for part in self.state.all_models() for each in part.modules()):
            raise UsageError("session.parallel: the module is no part of the State: State(model=module, ...)")
        synchronise = options.pop("init_sync", True)
        model = DistributedDataParallel(module, group=self.group, init_sync=False, **options)
        model.check_regroup()
        self._following.append(model)
        if synchronise:
            self._to_synchronise.append(model)
        self._is_new = True
        return model

    def on_resize(self, fn: Callable[[Resize], None]) -> None:
        """Call ``fn`` after the group has become smaller or larger, before the next step begins.

        On every rank but those that have just joined.  The place to scale a learning rate, where the batch
        changes with the group.
        """
        self._callbacks.append(fn)

    def leave(self) -> None:
        """Leave the session when the next step has been committed: ``steps`` ends, and the others go on.

        Where fewer than ``min`` ranks would be left, all end there, with a group that is whole.
        """
        self._members.notice.given = True

    def steps(self, until: int | None = None) -> Iterator[Step]:
        """The steps that are to be done, from ``state.steps`` on; one that was lost comes again.

        Args:
            until: as many count at the end; None: without an end.
        """
        while True:
            self.settle()
            if self.left or (until is not None and self.state.steps >= until):
                return
            if self._members.gather():
                if not self.left:
                    self._grow()
                continue
            if self._members.leavers:
                self._detach_gradients(keep=True)
                self._members.part(self.position, self.state.steps, self._sharded.most_that_leave)
                continue
            if self._members.asked_to_admit:
                self._grow()
            self._tell_of_events()
            step = Step(self)
            yield step
            if not step.entered:
                raise UsageError(f"step {step.number} was not used: the loop's body is `with step:`")

    def attempts(self) -> Iterator[Attempt]:
        """Runs of a block between two steps in which ranks communicate, such as an evaluation.

            for attempt in session.attempts():
                with attempt:
                    rank, size = session.group.rank, session.group.size
                    right = session.group.all_reduce(count_right(net, x[rank::size], y[rank::size])).wait()

        Every rank comes to it after the same step.  Mostly the block runs once.  If a rank is lost in it, the
        others run it again, in the group that is left, with the buffers and plain values of the state as they
        were; gradients, and what else the program has changed, are not put back.  When the loop ends, the
        block has come to its end on every rank that lives.

        In a process that has not joined yet the block runs alone, in a group of one.  A rank that the others
        go on without, as it leaves, gets none.

        Raises:
            UsageError: it is called in the block of a step or of an attempt.
        """
        while not self._members.is_out:
            if not self._members.is_joining:
                self.settle()
            attempt = Attempt(self)
            yield attempt
            if not attempt.entered:
                raise UsageError("an attempt was not used: the loop's body is `with attempt:`")
            if attempt.counts:
                break
        if not self._members.is_joining and not self._members.is_out:
            self.settle()
            self._tell_of_events()

    # -- what a step and an attempt ask for ----------------------------------------------------

    def begins(self, step: Step) -> None:
        """The block of ``step`` begins."""
        self._step = step
        self._stragglers.begin(self._following)
        if not self._compared:
            for each in self._following:
                each.check_regroup()

    def exchange(self, step: Step) -> None:
        """Wait until every rank has called ``commit``, and compare what they have done."""
        group, state = self.group, self.state
        samples = None if state.samples is None else state.samples.state_dict()
        same = repr((group.size, step.number, self.active, samples))
        seen = hashlib.blake2b(same.encode(), digest_size=16)
        if not self._compared:
            seen.update(state.digest())
        busy = self._stragglers.computed(self._following)
        mine = CommitRecord.of(group.epoch, step.number, seen.digest(), self._members.wish(), busy)
        rows = self._exchange(mine, f"commit of step {step.number}")
        self._compared = True
        self._members.hear(rows)
        self._stragglers.add(rows, group.rank)

    def attempt_begins(self, attempt: Attempt) -> None:
        """The block of ``attempt`` begins."""
        if self._step is not None and self._step.in_block:
            raise UsageError("session.attempts() is for what happens between two steps, not in one")
        if self._attempt is not None and self._attempt.running:
            raise UsageError("session.attempts() was called in the block of an attempt")
        self._attempt = attempt

    def exchange_after_block(self) -> None:
        """Wait until every rank has come to the end of the block."""
        digest = hashlib.blake2b(repr(self.position).encode(), digest_size=16).digest()
        mine = CommitRecord.of(self.group.epoch, BLOCK, digest, Wish.NONE, 0.0)
        self._exchange(mine, f"end of a block of attempts() after {self.state.steps} steps")

    def attempt_counts(self) -> None:
        """A block counts."""
        self._blocks += 1

    def _exchange(self, mine: CommitRecord, what: str) -> list[CommitRecord]:
        if self._table is None:
            self._table = CommitTable(self.group)
        rows = self._table.exchange(mine)
        if not agree(rows):
            raise divergence(rows, self.group, what, everything=not self._compared)
        return rows

    def recover(self, error: BaseException, progress: RankProgress) -> int | None:
        """Rebuild the group without the ranks that are lost; the new position, None: none is lost."""
        if not self._members.is_of_a_loss(error):
            return None
        began = time.monotonic()
        if not self._holds_state:
            progress = NOTHING
        prepared = progress.prepared >= 0
        self._detach_gradients(keep=prepared or (self._step is not None and self._step.committed))
        before = self.group
        rebuilt = self._members.rebuild(progress, min(self._members.least, before.size))
        if not rebuilt.lost and not rebuilt.left:
            raise error  # of the program, which would meet it again
        counts = steps_that_count(map(RankProgress.decode, rebuilt.notes.values()))
        if self._holds_state and counts > progress.committed + prepared:
            raise StateDiverged(
                f"rank {before.rank} of group {before.name!r} had not come to the end of what follows "
                f"{self.state.steps} steps when it counted on another rank"
            )
        again = self._step is not None and self._step.entered and counts == self._step.position
        in_step = self._step is not None and self._step.running
        number = counts - self._blocks if in_step else self.state.steps
        self._members.tell(number, before, began, rebuilt, again=again)
        return counts

    # -- the block -----------------------------------------------------------------------------

    def __enter__(self) -> Session:
        members = self._members
        members.begin(self._given)
        self._holds_state = not members.is_joining
        try:
            if members.may_begin and self._sharded.optimizer is not None:
                raise UsageError(
                    "SHOAL_JOIN=auto: the process that begins the session would hold all of the state, and "
                    "the State has a ZeroRedundancyOptimizer; start the first ranks with SHOAL_RANK and "
                    "SHOAL_SIZE, and the others with SHOAL_JOIN=1"
                )
            if not members.is_joining:
                members.check_size(self.group.size)
            self.group._channel.vote_limit()
            self._sharded.begin(self.group, self, joins=members.is_joining)
        except BaseException:
            if self._own:
                self.group.close()
            raise
        if self._sharded.optimizer is not None:
            self._following.append(self._sharded.optimizer)
            self._is_new = True
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
        self._sharded.end()
        try:
            if error is None and not self._members.is_joining and not self._members.is_out:
                self._end_together()
        finally:
            is_over = error is None and not self._members.is_out
            self._members.close(over=is_over)
            if not is_over:
                with contextlib.suppress(ShoalError):
                    self.group.close(_LEAVING)
            elif self._own:
                self.group.close()

    def _end_together(self) -> None:
        """Wait until all have come to the end: one in its last commit may need what this rank knows."""
        while True:
            self.settle()
            try:
                self.group.barrier().wait()
                return
            except GroupError as error:
                if not self._members.is_of_a_loss(error):
                    raise
            try:
                self._members.rebuild(RankProgress(self.position), 1)
            except GroupError:
                return  # this rank has all that counts, and the others have ended

    # -- another group -------------------------------------------------------------------------

    def goes_on(self, error: GroupError) -> bool:
        """Go on after a loss that was met after a commit; False: it was none."""
        return self.recover(error, RankProgress(self.position)) is not None

    def settle(self) -> None:
        """Begin in a new group: ranks that do not hold the state yet receive it, and what differs by rank is
        brought in order."""
        if self._members.join():
            self._holds_state = True
        while self._is_new:
            try:
                self._share_state()
                self._sharded.settle()
                self._is_new = False
            except GroupError as error:
                if not self.goes_on(error):
                    raise
        self._members.settled()

    def _tell_of_events(self) -> None:
        for event in self.events[self._told :]:
            self._told += 1
            for fn in self._callbacks:
                fn(event)

    def _share_state(self) -> None:
        group = self.group
        table = torch.empty(group.size, 3, dtype=torch.int64, device="cpu")
        mine = torch.tensor([[int(self._holds_state), self._synchronised, self._blocks]], device="cpu")
        group.all_gather_single(table, mine).wait()
        holders = [rank for rank, (holds, _, _) in enumerate(table.tolist()) if holds]
        others = [rank for rank, (holds, _, _) in enumerate(table.tolist()) if not holds]
        if not holders:
            raise StateLost(
                f"rank {group.rank} of {group.size} joined a session whose other ranks died before it had "
                "received their state; start again from a checkpoint"
            )
        if self._holds_state and others:
            send_state(self.state, group, holders, others)
        elif others:
            receive_state(self.state, group, holders)
            self._holds_state, self._blocks = True, int(table[holders[0], 2])
        else:
            # A loss may have met some ranks in this and others behind it: all repeat what one has not done.
            for model in self._to_synchronise[int(table[:, 1].min()) :]:
                model.synchronise()
        self._synchronised = len(self._to_synchronise)

    def _grow(self) -> None:
        """Take in those that wait, unless they have gone."""
        began, before = time.monotonic(), self.group
        grown = self._members.meet()
        if grown is None:
            return
        self._detach_gradients(keep=True)
        self._members.go_over(grown)
        place = len(self.events)
        self.settle()  # in which ranks may be lost again
        self._members.tell(self.state.steps, before, began, None, group=grown, place=place)

    def _follow(self, group: ProcessGroup) -> None:
        """Go over to a new group."""
        self._is_new, self._compared, self._table = True, False, None
        self._stragglers.begin_anew()
        for each in self._following:
            each.regroup(group)

    def _check_size(self, size: int) -> None:
        if self.state.samples is not None:
            self.state.samples.batch(size if self.active is None else min(self.active, size))

    # -- inside --------------------------------------------------------------------------------

    def _detach_gradients(self, *, keep: bool) -> None:
        """Let go of the memory of the group in which gradients are."""
        for model in self.state.all_models():
            for parameter in model.parameters():
                gradient = parameter.grad
                parameter.grad = gradient.clone() if keep and gradient is not None else None

    def _refuse_early_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._attempt is not None and self._attempt.running:
            raise UsageError(
                f"{type(optimizer).__name__} stepped in a block of attempts(), which comes again if a rank "
                "is lost: parameters change in steps"
            )
        if self._step is not None and self._step.running:
            raise UsageError(
                f"{type(optimizer).__name__} stepped before step.commit(): if a rank were lost now, the "
                "others could not tell whether to do the step again.  Call step.commit() first; optimisers "
                "that step in backward cannot be used"
            )
        self._sharded.steps(optimizer, self._step)
