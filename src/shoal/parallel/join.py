"""Training on uneven inputs: ranks may run out of batches at different times.

In each step of data-parallel training every rank takes part in the same collectives.  In a Join, a rank
without batches shadows the steps of the others at the end of the block, until all ranks are there.

Each step begins with a small all-reduce that counts the active ranks.  The first joinable takes part in it
(:meth:`Join.notify_join_context`), or the Join itself on ranks without batches.  Then active ranks compute,
and the others call :meth:`JoinHook.main_hook` of every joinable.  When no rank is active, all ranks call
:meth:`JoinHook.post_hook`.

The interface is that of PyTorch's generic join (``torch.distributed.algorithms.join``).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, TypeVar

import torch

from ..common.arguments import accepted_keywords, keyword_names, unknown_keyword_error
from ..common.copy_refusal import refuses_copies
from ..common.formatting import error_repr, ranks_named
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
from ..group.group_argument import resolve_group

#: Number of shadowed steps after which a rank warns of very uneven inputs.
_SKEW_WARNING_STEPS = 1000

#: Errors that all ranks raise in the same collective, so that no rank waits for one that left the block.
_RAISED_EVERYWHERE = (UnevenInputs, UnusedParameterError, OutOfStep, ModelMismatch)

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def takes_named_options(join_hook: _Hook) -> _Hook:
    """Mark a ``join_hook`` that uses only the options named in its signature, despite ``**kwargs``."""
    join_hook._takes_named_options = True  # type: ignore[attr-defined]
    return join_hook


class _Part(IntEnum):
    """The part of a rank in a step."""

    SHADOWS = 0  # it has no batch
    ACTIVE = 1
    REFUSES = 2  # it refuses a nested Join


class NestedJoinError(UsageError):
    """A nested Join of ``group``; ``agreed`` if all ranks know that none waits for this rank."""

    def __init__(self, text: str, group: ProcessGroup, agreed: bool = False) -> None:
        super().__init__(text)
        self.group, self.agreed = group, agreed


class JoinHook:
    """The functions that a rank without batches calls for one joinable.  Override those that are needed."""

    def main_hook(self) -> None:
        """Shadow the collectives of one step of the ranks that are still active, in the same order."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once on every rank, when no rank has batches left.  It may communicate.

        Args:
            is_last_joiner: whether this rank was among the last active ranks.  At least one rank was.
        """


class Joinable(ABC):
    """An object that communicates in every step and can be used in a :class:`Join`.

    A subclass must call ``Joinable.__init__(self)`` in its constructor, and
    ``Join.notify_join_context(self)`` in every step before its first collective.
    """

    _join_config: JoinConfig

    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a new hook for one Join.

        Args:
            kwargs: all keyword arguments of the Join, including those for other joinables.  If no
                ``join_hook`` has ``**kwargs``, a Join accepts only the arguments in their signatures.
        """

    def _end_of_batch(self) -> None:
        """Raise pending errors of the last batch; called when this rank has no more batches."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the Join's own tensors; that of the first joinable is used."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group, the same for all joinables of a Join.

        A :class:`~shoal.ProcessGroup`, or a group of torch.distributed with the backend "shoal".
        """


@dataclass(frozen=True)
class JoinConfig:
    """The settings of the Join that a joinable is in.  Copies and pickles of it are disabled.

    Attributes:
        enable: whether the joinable is in a Join.
        throw_on_early_termination: whether the Join ends when the first rank runs out of batches.
        is_first_joinable: whether this joinable takes part in counting the active ranks.
    """

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False

    def __reduce__(self) -> tuple[type[JoinConfig], tuple[()]]:
        if self.enable:
            warnings.warn(
                "a joinable (a model or an optimiser) is saved or copied inside an active Join; the copy "
                "is not in the Join and takes no part in its steps.  Save it after the Join's block",
                stacklevel=2,
            )
        return JoinConfig, ()


@refuses_copies("a Join", "the joinables and their group", "Make another one of the copied joinables")
class Join:
    """A context manager for training in which ranks have different numbers of batches.

        with shoal.Join([model, optimizer]):
            for inputs, targets in batches:  # some ranks have more of them than others
                loss(model(inputs), targets).backward()
                optimizer.step()

    All ranks must enter it, with the same arguments.  A Join can be used again, also after a failure that
    left the group usable.  A group can be in one Join at a time; a nested Join is refused on all ranks.

    An exception that leaves the block skips shadowing.  The other ranks would wait for this one, so the group
    is aborted, as by the block of a ProcessGroup, and they raise GroupAborted with the reason.  The group is
    not aborted for errors that all ranks raise (UnevenInputs, UnusedParameterError, OutOfStep,
    ModelMismatch), nor with ``enable=False``.

    Args:
        joinables: the objects that communicate in each step.  Their hooks are called in this order; the first
            one must be the first to communicate in every step.
        enable: False disables the Join, for inputs known to be even.
        throw_on_early_termination: instead of shadowing, raise UnevenInputs on every rank when the first rank
            runs out of batches.  The group stays usable.  Every step then waits for all ranks.
        kwargs: passed to the ``join_hook`` of every joinable.

    Raises:
        UsageError: there are no joinables, one is not an initialised Joinable or occurs twice, they have
            different groups, none takes a keyword argument, or the group is already in a Join.
        UnevenInputs: with ``throw_on_early_termination``; in a step, or for ranks without batches at the end.
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
                raise NestedJoinError(
                    f"{_name(joinable)} is inside another Join already; give all joinables to one Join, or "
                    "leave the other one first",
                    self._group,
                )
        if self._group.join_block is not None:
            raise NestedJoinError(
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
        # From here on only the Join counts this rank, although a hook may call code that notifies the Join.
        for joinable in self._joinables:
            joinable._join_config = JoinConfig()
        if error is not None:
            self._abort_if_needed(error)
            return
        try:
            for joinable in self._joinables:
                joinable._end_of_batch()
            was_last = self._shadow(hooks)
            for hook in hooks:
                hook.post_hook(was_last)
        except BaseException as raised:
            self._abort_if_needed(raised)
            raise

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Future[torch.Tensor] | None:
        """Report that this rank is active.  A joinable calls it in each step before it communicates.

        Returns:
            A future of the number of active ranks (int64, no dimensions, on the ``join_device``); waiting for
            it is optional.  None outside of a Join, in a group of one, and for all joinables but the first.

        Raises:
            UsageError: the joinable's constructor did not call ``Joinable.__init__(self)``.
            UnevenInputs: a rank ran out of batches, and ``throw_on_early_termination`` is set.
        """
        config = _config(joinable)
        if not (config.enable and config.is_first_joinable):
            return None
        group = _group_of(joinable)
        if group.size == 1:
            return None
        named = config.throw_on_early_termination
        answer = _count_active(group, joinable.join_device, _Part.ACTIVE, named=named)
        if not named:
            return answer
        active = answer.wait()
        _raise_if_uneven(group, active)
        count: Future[torch.Tensor] = Future()
        count.set_result(active.sum().to(joinable.join_device))
        return count

    def _shadow(self, hooks: Sequence[JoinHook]) -> bool:
        """Shadow the active ranks until there are none; return whether this rank was among the last."""
        if self._group.size == 1:
            return True
        steps = 0
        while True:
            active = _count_active(self._group, self._device, _Part.SHADOWS, named=self._throw).wait()
            if not int(active.sum()):
                return steps == 0
            if self._count_refusals(active)[0]:
                raise NestedJoinError(
                    f"other ranks of group {self._group.name!r} entered a Join inside the block of this one, "
                    f"which is refused (seen by rank {self._group.rank}).  Give all joinables to one Join",
                    self._group,
                    agreed=True,
                )
            if self._throw:
                _raise_if_uneven(self._group, active)
            if steps == _SKEW_WARNING_STEPS:
                self._warn()
            for hook in hooks:
                hook.main_hook()
            steps += 1

    def _abort_if_needed(self, error: BaseException) -> None:
        """Abort the group if other ranks would wait for this one, which leaves the block with ``error``."""
        orderly = isinstance(error, SystemExit) and not error.code
        broken = isinstance(error, GroupError) and not isinstance(error, OutOfSharedMemory)
        if orderly or broken or isinstance(error, _RAISED_EVERYWHERE):
            return
        if (
            isinstance(error, NestedJoinError)
            and error.group is self._group
            and (error.agreed or self._others_do_not_wait())
        ):
            error.agreed = True
            return
        self._group.abort(
            f"an exception left the block of a Join on rank {self._group.rank}: {error_repr(error)}"
        )

    def _others_do_not_wait(self) -> bool:
        """Whether no rank waits for this one, which leaves the block because of a nested Join.

        Ranks with the same program refuse it too; ranks that shadow are notified here; ranks in a step wait.
        """
        if self._group.size == 1:
            return True
        try:
            active = _count_active(self._group, self._device, _Part.REFUSES, named=self._throw).wait()
        except GroupError:
            return False
        return not self._count_refusals(active)[1]

    def _count_refusals(self, active: torch.Tensor) -> tuple[int, int]:
        """Return the numbers of ranks that refused a nested Join, and of ranks in a step."""
        if self._throw:
            counts = active.tolist()
            return counts.count(_Part.REFUSES), counts.count(_Part.ACTIVE)
        return divmod(int(active), self._group.size + 1)

    def _warn(self) -> None:
        warnings.warn(
            f"Detected uneven input skew of greater than {_SKEW_WARNING_STEPS}. This means that rank "
            f"{self._group.rank} has at least {_SKEW_WARNING_STEPS} fewer inputs than other currently-active "
            "ranks. This level of skew could lead to performance degradation during training.",
            stacklevel=4,
        )


def _count_active(
    group: ProcessGroup, device: torch.device, part: _Part, *, named: bool
) -> Future[torch.Tensor]:
    """Return the part of each rank if ``named``, else ``active + refusing * (size + 1)``.  Collective.

    The parts are on the host, where every rank reads them in each step; the sum is on ``device``.
    """
    if not named:
        weight = group.size + 1 if part is _Part.REFUSES else int(part)
        return group.all_reduce(torch.full((), weight, device=device))
    active = torch.zeros(group.size, dtype=torch.int64, device="cpu")
    active[group.rank] = part
    return group.all_reduce(active)


def _raise_if_uneven(group: ProcessGroup, active: torch.Tensor) -> None:
    missing = [rank for rank, present in enumerate(active.tolist()) if not present]
    if missing:
        raise UnevenInputs(
            f"{ranks_named(missing)} of group {group.name!r} ran out of batches while others "
            f"had more (seen by rank {group.rank}); this Join raises in that case "
            "(throw_on_early_termination=True).  Without that option the remaining ranks continue",
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
    if any(accepted_keywords(hook) is None and not hasattr(hook, "_takes_named_options") for hook in hooks):
        return
    known = dict.fromkeys(name for hook in hooks for name in keyword_names(hook))
    if unknown := [name for name in kwargs if name not in known]:
        raise unknown_keyword_error("Join", unknown, [*keyword_names(Join), *known])


def _group_of(joinable: Joinable) -> ProcessGroup:
    return resolve_group(joinable.join_process_group, "Join", f"join_process_group of {_name(joinable)}")


def _config(joinable: Joinable) -> JoinConfig:
    if not isinstance(joinable, Joinable):
        kind = type(joinable)
        hint = ""
        if kind.__module__.startswith("torch.") and hasattr(joinable, "join_hook"):
            hint = "; for objects of torch use torch.distributed.algorithms.join.Join, or model.join()"
        raise UsageError(f"expected a shoal.Joinable, got {kind.__module__}.{kind.__qualname__}{hint}")
    config: JoinConfig | None = getattr(joinable, "_join_config", None)
    if config is None:
        raise UsageError(
            f"{_name(joinable)} is a Joinable that was not initialised; call Joinable.__init__(self) in its "
            "constructor (super().__init__() of nn.Module or Optimizer does not call it)"
        )
    return config


def _hook(joinable: Joinable, kwargs: dict[str, Any]) -> JoinHook:
    names = accepted_keywords(joinable.join_hook)
    if names is not None:
        kwargs = {name: value for name, value in kwargs.items() if name in names}
    hook = joinable.join_hook(**kwargs)
    if not isinstance(hook, JoinHook):
        raise UsageError(f"join_hook of {_name(joinable)} must return a JoinHook, got {_name(hook)}")
    return hook


def _name(value: object) -> str:
    return type(value).__name__
