"""Join: ranks may run out of batches at different times.

Data-parallel training is a sequence of steps, and in each of them every rank takes part in the same
collectives.  A rank that has fewer batches than others would be missed in theirs.  Within a Join it goes on
instead: at the end of the block it shadows what the others still communicate, step by step, until all are
there.

At the beginning of each step a rank says that it is still active, and a rank that has run out says that it is
not: one small all-reduce, whose sum tells both sides how many are active.  It is the first of the joinables
that speaks (:meth:`Join.notify_join_context`), or on ranks that have run out the Join itself.  Then the
active ranks compute, and the others call every joinable's :meth:`JoinHook.main_hook`.  When the sum is zero
nobody is left, and :meth:`JoinHook.post_hook` has the last word.

After PyTorch's generic join context manager (``torch.distributed.algorithms.join``).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch

from ..common.copy_refusal import refuses_copies
from ..common.keywords import misspelt, named, taken
from ..common.wording import ranks_named, shown
from ..errors import (
    GroupError,
    ModelMismatch,
    OutOfSharedMemory,
    OutOfStep,
    UnevenInputs,
    UnusedParameterError,
    UsageError,
)
from ..future import Future
from ..group import ProcessGroup
from ..group.group_argument import given_group

#: A rank that has shadowed so many steps says that the inputs are very uneven.
_MANY_STEPS = 1000

#: The errors that every rank raises, alike and at the same place, so that nobody waits for the one that left.
_RAISED_EVERYWHERE = (UnevenInputs, UnusedParameterError, OutOfStep, ModelMismatch)

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def takes_named_options(join_hook: _Hook) -> _Hook:
    """Mark a ``join_hook`` that uses no options but those of its signature, in spite of ``**kwargs``."""
    join_hook._takes_named_options = True  # type: ignore[attr-defined]
    return join_hook


class _NestedJoin(UsageError):
    """A Join was entered in the block of another one of the same group.

    Attributes:
        group: the group.
        agreed: whether its ranks know that nobody waits for this one.
    """

    def __init__(self, text: str, group: ProcessGroup, agreed: bool = False) -> None:
        super().__init__(text)
        self.group, self.agreed = group, agreed


class JoinHook:
    """The functions that a rank without batches runs for one joinable.  Override those that are needed."""

    def main_hook(self) -> None:
        """Shadow the collectives of one step of the ranks that are still active, in the same order."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once on every rank, when all have run out.  It may communicate.

        Args:
            is_last_joiner: whether this rank was among those that were active longest.  At least one was.
        """


class Joinable(ABC):
    """Something that communicates in every step and can do so within a :class:`Join`.

    A class of this kind calls ``Joinable.__init__(self)`` in its constructor, and
    ``Join.notify_join_context(self)`` in every step before its first collective.
    """

    _join_config: JoinConfig

    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """A new hook for one Join.

        Args:
            kwargs: all keyword arguments that the Join was given; those of other joinables are among them.
                A Join takes any if a ``join_hook`` has ``**kwargs``, and those in its signature otherwise.
        """

    def _end_of_batch(self) -> None:
        """Raise what is still unsaid of the last batch; called when this rank has no more of them."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the Join's own tensors; the first joinable decides."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The ranks; the same for all joinables of a Join.

        A :class:`~shoal.ProcessGroup`, or a group of torch.distributed over the backend "shoal".
        """


@dataclass(frozen=True)
class JoinConfig:
    """The Join that a joinable is in, as far as the joinable has to know it.

    It belongs to that Join and not to the joinable: in a copy or a file it is disabled.

    Attributes:
        enable: whether there is one.
        throw_on_early_termination: whether it ends with the first rank that runs out.
        is_first_joinable: whether it is this joinable that speaks.
    """

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False

    def __reduce__(self) -> tuple[type[JoinConfig], tuple[()]]:
        if self.enable:
            warnings.warn(
                "a joinable (a model or an optimiser) is saved or copied inside an active Join; the copy "
                "does not know of the Join and takes no part in its steps.  Save it after the Join's block",
                stacklevel=2,
            )
        return JoinConfig, ()


@refuses_copies(
    "a Join",
    "the joinables and their group",
    "Make another one of the copied joinables",
)
class Join:
    """Within this context ranks may have uneven numbers of batches.

        with shoal.Join([model, optimizer]):
            for inputs, targets in batches:  # some ranks have more of them than others
                loss(model(inputs), targets).backward()
                optimizer.step()

    All ranks enter it, with the same arguments.  A Join may be used again, also after a failure that left
    the group usable.  A group is in one Join at a time: another one inside its block is refused on all ranks.

    An exception that leaves the block leaves it at once, without shadowing.  The other ranks would wait in
    vain for this one, so its group is aborted, as the block of a ProcessGroup would do, and they raise
    GroupAborted with the reason.  It is not aborted after errors that all ranks raise together (UnevenInputs,
    UnusedParameterError, OutOfStep, ModelMismatch), nor where there was nothing to wait for
    (``enable=False``).

    Args:
        joinables: what communicates in each step.  Their hooks are called in this order, and the first one
            speaks for all: it must be one that communicates first in every step.
        enable: False does nothing at all: for inputs known to be even.
        throw_on_early_termination: do not shadow: when the first rank runs out before the others, raise
            UnevenInputs on every rank.  The group stays usable.  Every step waits for all ranks then.
        kwargs: given to every joinable's ``join_hook``.

    Raises:
        UsageError: no joinables, one that is none or whose constructor did not call that of Joinable, one
            named twice, joinables of several groups, a keyword argument that none of them takes, or a block
            inside that of another Join of the group.
        UnevenInputs: with ``throw_on_early_termination``; from the step of the active ranks, and at the end
            of the block of the others.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = list(joinables)
        self._group = _common_group(self._joinables)
        _refuse_unknown(self._joinables, kwargs)
        self._device = self._joinables[0].join_device
        self._enable = enable
        self._throw = throw_on_early_termination
        self._kwargs = kwargs
        self._hooks: list[JoinHook] = []

    def __enter__(self) -> Join:
        if not self._enable:
            return self
        for joinable in self._joinables:
            if joinable._join_config.enable:
                raise _NestedJoin(
                    f"{_name(joinable)} is inside another Join already; give all joinables to one Join, or "
                    "leave the other one first",
                    self._group,
                )
        if self._group.join_block is not None:
            raise _NestedJoin(
                f"a Join of {', '.join(map(_name, self._joinables))} was entered on rank {self._group.rank} "
                f"inside the block of another Join of group {self._group.name!r}, and their steps would mix; "
                "give all joinables to one Join, or leave the other one first",
                self._group,
            )
        self._hooks = [_hook(joinable, self._kwargs) for joinable in self._joinables]
        for index, joinable in enumerate(self._joinables):
            joinable._join_config = JoinConfig(True, self._throw, is_first_joinable=index == 0)
        self._group.join_block = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enable:
            return
        hooks, self._hooks = self._hooks, []
        self._group.join_block = None
        # From here on the Join speaks for this rank: a hook may run the very code that notifies it.
        for joinable in self._joinables:
            joinable._join_config = JoinConfig()
        if error is not None:
            self._leave_behind(error)
            return
        try:
            for joinable in self._joinables:
                joinable._end_of_batch()
            was_last = self._shadow(hooks)
            for hook in hooks:
                hook.post_hook(was_last)
        except BaseException as raised:
            self._leave_behind(raised)
            raise

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Future[torch.Tensor] | None:
        """Say that this rank is still active.  A joinable calls it in each step before it communicates.

        Returns:
            A future of the number of ranks that are still active (int64, no dimensions, on the
            ``join_device``), or None if there is nothing to say: outside of a Join, in a group of one, and
            for all joinables but the first.  Nobody has to wait for it.

        Raises:
            UsageError: the joinable's constructor did not call ``Joinable.__init__(self)``.
            UnevenInputs: a rank ran out, and the Join was told to raise then.
        """
        config = _config(joinable)
        if not (config.enable and config.is_first_joinable):
            return None
        group = _group_of(joinable)
        if group.size == 1:
            return None
        named = config.throw_on_early_termination
        answer = _count_active(group, joinable.join_device, 1, named=named)
        if not named:
            return answer
        active = answer.wait()
        _raise_if_uneven(group, active)
        count: Future[torch.Tensor] = Future()
        count.set_result(active.sum())
        return count

    def _shadow(self, hooks: Sequence[JoinHook]) -> bool:
        """Keep the active ranks company until none is left; whether this rank was among the last."""
        if self._group.size == 1:
            return True
        steps = 0
        while True:
            active = _count_active(self._group, self._device, 0, named=self._throw).wait()
            if not int(active.sum()):
                return steps == 0
            if self._refused(active)[0]:
                raise _NestedJoin(
                    f"other ranks of group {self._group.name!r} entered a Join inside the block of this one, "
                    f"which is refused (seen by rank {self._group.rank}).  Give all joinables to one Join",
                    self._group,
                    agreed=True,
                )
            if self._throw:
                _raise_if_uneven(self._group, active)
            if steps == _MANY_STEPS:
                self._warn()
            for hook in hooks:
                hook.main_hook()
            steps += 1

    def _leave_behind(self, error: BaseException) -> None:
        """Keep the others from waiting for a rank that leaves with ``error``."""
        orderly = isinstance(error, SystemExit) and not error.code
        broken = isinstance(error, GroupError) and not isinstance(error, OutOfSharedMemory)
        if orderly or broken or isinstance(error, _RAISED_EVERYWHERE):
            return
        if isinstance(error, _NestedJoin) and error.group is self._group and (error.agreed or self._agrees()):
            error.agreed = True
            return
        self._group.abort(f"an exception left the block of a Join on rank {self._group.rank}: {shown(error)}")

    def _agrees(self) -> bool:
        """Whether no rank waits for this one, which leaves because another Join was refused.

        On a rank that runs the same program the Join is refused too, and one that shadows is told here.  A
        rank that is in a step would wait.
        """
        if self._group.size == 1:
            return True
        refusing = self._group.size + 1
        try:
            active = _count_active(
                self._group, self._device, 2 if self._throw else refusing, named=self._throw
            ).wait()
        except GroupError:
            return False
        return not self._refused(active)[1]

    def _refused(self, active: torch.Tensor) -> tuple[int, int]:
        """The number of ranks that leave because another Join was refused, and of those in a step."""
        if self._throw:
            told = active.tolist()
            return told.count(2), told.count(1)
        return divmod(int(active), self._group.size + 1)

    def _warn(self) -> None:
        warnings.warn(
            f"Detected uneven input skew of greater than {_MANY_STEPS}. This means that rank "
            f"{self._group.rank} has at least {_MANY_STEPS} fewer inputs than other currently-active ranks. "
            "This level of skew could lead to performance degradation during training.",
            stacklevel=4,
        )


def _count_active(
    group: ProcessGroup, device: torch.device, mine: int, *, named: bool
) -> Future[torch.Tensor]:
    """The number of active ranks, or for each rank whether it is (``named``): one element for each.

    Args:
        mine: 1: active; 0: shadows; else as of ``Join._agrees``.
    """
    if not named:
        return group.all_reduce(torch.full((), mine, device=device))
    active = torch.zeros(group.size, dtype=torch.int64, device=device)
    active[group.rank] = mine
    return group.all_reduce(active)


def _raise_if_uneven(group: ProcessGroup, active: torch.Tensor) -> None:
    missing = [rank for rank, present in enumerate(active.tolist()) if not present]
    if missing:
        raise UnevenInputs(
            f"{ranks_named(missing)} of group {group.name!r} ran out of batches while others "
            f"had more (seen by rank {group.rank}); this Join was told to raise then "
            "(throw_on_early_termination=True).  Without that it would go on with the remaining ranks",
            missing,
        )


def _common_group(joinables: Sequence[Joinable]) -> ProcessGroup:
    if not joinables:
        raise UsageError("a Join takes at least one joinable, got none")
    for index, joinable in enumerate(joinables):
        _config(joinable)
        if any(joinable is other for other in joinables[:index]):
            raise UsageError(f"joinable {index} of the Join, {_name(joinable)}, is named twice")
    group = _group_of(joinables[0])
    for joinable in joinables[1:]:
        other = _group_of(joinable)
        if other is not group:
            raise UsageError(
                f"the joinables of a Join must share one group: {_name(joinables[0])} has {group!r}, but "
                f"{_name(joinable)} has {other!r}"
            )
    return group


def _refuse_unknown(joinables: Sequence[Joinable], kwargs: dict[str, Any]) -> None:
    """Raise for a keyword argument that no joinable takes."""
    hooks = [joinable.join_hook for joinable in joinables]
    if any(taken(hook) is None and not hasattr(hook, "_takes_named_options") for hook in hooks):
        return
    known = dict.fromkeys(name for hook in hooks for name in named(hook))
    if unknown := [name for name in kwargs if name not in known]:
        raise misspelt("Join", unknown, [*named(Join), *known])


def _group_of(joinable: Joinable) -> ProcessGroup:
    return given_group(joinable.join_process_group, "Join", f"join_process_group of {_name(joinable)}")


def _config(joinable: Joinable) -> JoinConfig:
    if not isinstance(joinable, Joinable):
        kind = type(joinable)
        hint = ""
        if kind.__module__.startswith("torch.") and hasattr(joinable, "join_hook"):
            hint = "; what torch makes goes into torch.distributed.algorithms.join.Join, or model.join()"
        raise UsageError(f"expected a shoal.Joinable, got {kind.__module__}.{kind.__qualname__}{hint}")
    config: JoinConfig | None = getattr(joinable, "_join_config", None)
    if config is None:
        raise UsageError(
            f"{_name(joinable)} is a Joinable that was not initialised; call Joinable.__init__(self) in its "
            "constructor (super().__init__() does not arrive there through nn.Module or Optimizer)"
        )
    return config


def _hook(joinable: Joinable, kwargs: dict[str, Any]) -> JoinHook:
    names = taken(joinable.join_hook)
    if names is not None:
        kwargs = {name: value for name, value in kwargs.items() if name in names}
    hook = joinable.join_hook(**kwargs)
    if not isinstance(hook, JoinHook):
        raise UsageError(f"join_hook of {_name(joinable)} must return a JoinHook, got {_name(hook)}")
    return hook


def _name(value: object) -> str:
    return type(value).__name__
