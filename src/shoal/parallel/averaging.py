"""Model averaging: ranks train by themselves for some steps and then average their parameters.

With :func:`shoal.parallel.hooks.post_localSGD_hook` the averagers implement post-local SGD (Lin, Stich, Patel
and Jaggi, arXiv:1808.07217), and with several levels of groups hierarchical SGD (Wang et al.,
arXiv:2010.12998).
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch

from ..common.arguments import accept_both_group_names
from ..errors import UsageError
from ..future import Future
from ..group import ProcessGroup
from ..group.group_argument import resolve_group
from ..spec import AVG
from .coalesced import broadcast_obstacle, split_messages

#: Parameters, or the parameter groups of an optimiser.
Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def average_parameters(params: Parameters, group: object = None) -> None:
    """Replace each parameter by its mean over all ranks of ``group``.  Collective and blocking.

    Parameters of one dtype and device are sent together, in messages of at most 25 MiB; one message is packed
    while another is sent.  The means are those of ``ProcessGroup.all_reduce``, bitwise equal on all ranks.

    Args:
        params: the parameters of a model, or the parameter groups of an optimiser; the same on all ranks.
            Parameters that do not require a gradient are skipped.  Unlike in torch, parameters without a
            gradient are averaged, since these may differ between ranks with different data.

    Raises:
        UsageError: ``params`` contains other objects, or a tensor that cannot be sent.
        OutOfSharedMemory: a message does not fit into shared memory.
    """
    ranks = resolve_group(group, "average_parameters")
    on_the_way: list[tuple[list[torch.Tensor], list[torch.Tensor], Future[torch.Tensor]]] = []

    def unpack_one() -> None:
        tensors, views, future = on_the_way.pop(0)
        future.wait(blocking=False)
        torch._foreach_copy_(tensors, views)

    with torch.no_grad():
        for tensors in split_messages(list(_trained(params)), attrgetter("dtype", "device")):
            count = sum(x.numel() for x in tensors)
            memory = ranks.empty(count, dtype=tensors[0].dtype, device=tensors[0].device)
            parts = memory.split_with_sizes([x.numel() for x in tensors])
            views = [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
            torch._foreach_copy_(views, tensors)
            on_the_way.append((tensors, views, ranks.all_reduce(memory, AVG)))
            if len(on_the_way) > 1:
                unpack_one()
        while on_the_way:
            unpack_one()


def _trained(params: Parameters) -> Iterator[torch.Tensor]:
    for item in params:
        some = item["params"] if isinstance(item, dict) else [item]
        for parameter in some:
            if not isinstance(parameter, torch.Tensor):
                raise UsageError(
                    "expected the parameters of a model or the parameter groups of an optimiser, got "
                    f"{type(parameter).__name__}"
                )
            if parameter.requires_grad:
                if (reason := broadcast_obstacle(parameter)) is not None:
                    raise UsageError(
                        f"a parameter of shape {list(parameter.shape)} cannot be averaged: {reason}"
                    )
                yield parameter


class ModelAverager(abc.ABC):
    """Averages parameters in some steps, and counts the steps.

    Args:
        group: the ranks to average over.
        warmup_steps: number of first steps without averaging, in which gradients are averaged over all ranks.

    Attributes:
        step: number of calls of :meth:`average_parameters` so far.
        group: the group.
    """

    def __init__(self, group: object, warmup_steps: int) -> None:
        if not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise UsageError(f"warmup_steps must be a number of steps, got {warmup_steps!r}")
        self.group = resolve_group(group, type(self).__name__)
        self.warmup_steps = warmup_steps
        self.step = 0

    def average_parameters(self, params: Parameters) -> None:
        """Average ``params`` if due, and count the step.  Call it after every ``optimizer.step()``.

        Args:
            params: as for :func:`average_parameters`.
        """
        step = self.step
        self.step += 1
        if step >= self.warmup_steps and (group := self._group_for(step)) is not None:
            average_parameters(params, group)

    @abc.abstractmethod
    def _group_for(self, step: int) -> ProcessGroup | None:
        """Return the group to average over in this step, or None."""


@accept_both_group_names
class PeriodicModelAverager(ModelAverager):
    """Averages parameters over all ranks every ``period`` steps, the first time right after the warm-up.

    Args:
        period: number of steps.
        warmup_steps: number of steps before; equal to ``start_localSGD_iter`` of the hook's state.
        group: the ranks to average over.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(self, period: int, warmup_steps: int = 0, *, group: object = None) -> None:
        super().__init__(group, warmup_steps)
        _check_period(period)
        if period == 1:
            _warn_of_period_1()
        self.period = period

    def _group_for(self, step: int) -> ProcessGroup | None:
        return self.group if (step - self.warmup_steps) % self.period == 0 else None


@accept_both_group_names
class HierarchicalModelAverager(ModelAverager):
    """Averages parameters often in small groups of neighbouring ranks, and rarely in large ones.

    In a step that several periods divide, only the largest of their groups averages.  Groups have consecutive
    ranks: with sizes 2 and 4 on 4 ranks, they are {0, 1} and {2, 3}, and {0, 1, 2, 3}.

    Args:
        period_group_size_dict: the group size for each period in steps, both ascending.  Each size must be a
            multiple of the previous one, and the last must be the size of ``group``.
        warmup_steps: number of steps before; equal to ``start_localSGD_iter`` of the hook's state.
        group: all ranks.

    Attributes:
        period_process_group_dict: this rank's group for each period; closed with the first group of the job.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self, period_group_size_dict: Mapping[int, int], warmup_steps: int = 0, *, group: object = None
    ) -> None:
        super().__init__(group, warmup_steps)
        ranks = self.group
        _check_hierarchy(period_group_size_dict, ranks.size)
        if max(period_group_size_dict) == 1:
            _warn_of_period_1()
        self.period_process_group_dict = {
            period: ranks if size == ranks.size else ranks.subgroup(_block(ranks.rank, size))
            for period, size in period_group_size_dict.items()
        }
        for subgroup in self.period_process_group_dict.values():
            if subgroup is not ranks:
                ranks.world.retain(subgroup)

    def _group_for(self, step: int) -> ProcessGroup | None:
        for period, group in reversed(self.period_process_group_dict.items()):
            if step % period == 0:
                return group
        return None


def _block(rank: int, size: int) -> range:
    start = rank // size * size
    return range(start, start + size)


def _check_period(period: object) -> None:
    if not isinstance(period, int) or period < 1:
        raise UsageError(f"a period must be a positive number of steps, got {period!r}")


def _check_hierarchy(sizes: Mapping[int, int], ranks: int) -> None:
    if not isinstance(sizes, Mapping) or not sizes:
        raise UsageError(f"period_group_size_dict must give a group size for each period, got {sizes!r}")
    smaller, shorter = 1, 0
    for period, size in sizes.items():
        _check_period(period)
        if period <= shorter:
            raise UsageError(f"the periods of period_group_size_dict must grow, got {period} after {shorter}")
        if not isinstance(size, int) or size < 1 or size % smaller != 0:
            raise UsageError(
                f"each size in period_group_size_dict must be a multiple of the one before, got {size!r} "
                f"after {smaller}"
            )
        smaller, shorter = size, period
    if smaller != ranks:
        raise UsageError(
            f"the last size in period_group_size_dict must be that of the group, {ranks}, got {smaller}"
        )


def _warn_of_period_1() -> None:
    warnings.warn(
        "averaging parameters in every step costs no less than averaging gradients, which "
        "DistributedDataParallel does without an averager; choose a longer period",
        stacklevel=3,
    )


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Any optimiser, followed by a step of ``averager`` over its parameters: post-local SGD.

    Everything else (parameter groups, state, hooks) is that of the inner optimiser, so schedulers and
    gradient scalers work as with it.

    Args:
        optim: the inner optimiser, which computes the step on each rank.
        averager: a :class:`~shoal.PeriodicModelAverager` or :class:`~shoal.HierarchicalModelAverager`.

    Raises:
        UsageError: an argument has another type.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        # The base class is only for isinstance(); its state is that of the inner optimiser.
        if not isinstance(optim, torch.optim.Optimizer):
            raise UsageError(f"optim must be an optimiser of torch, got {type(optim).__name__}")
        if not isinstance(averager, ModelAverager):
            raise UsageError(
                "averager must be a PeriodicModelAverager or HierarchicalModelAverager, got "
                f"{type(averager).__name__}"
            )
        self.optim = optim
        self.averager = averager

    def __getattr__(self, name: str) -> Any:
        if name in ("optim", "averager"):
            raise AttributeError(name)  # during unpickling or copying
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the inner optimiser."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimiser."""
        return self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run a step of the inner optimiser, and average its parameters if due.

        Args:
            closure: recomputes the loss, for optimisers that need this.

        Returns:
            The result of the inner optimiser's step: the loss, with a closure.
        """
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.optim.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train and average."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimiser, with the averager's step as ``"step"``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`; without an averager's step, warn and count from 0."""
        inner = dict(state_dict)
        step = inner.pop("step", None)
        self.optim.load_state_dict(inner)
        if step is None:
            warnings.warn(
                "the loaded state does not contain the step of the averager, which counts from 0, with its "
                "warm-up first",
                stacklevel=2,
            )
        self.averager.step = step or 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
