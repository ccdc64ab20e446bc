"""Model averagers, which choose the steps and groups for averaging parameters.

With :func:`shoal.parallel.hooks.post_localSGD_hook` they implement post-local SGD (Lin, Stich, Patel and
Jaggi, arXiv:1808.07217), and with several levels of groups hierarchical SGD (Wang et al., arXiv:2010.12998).
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Mapping

from ...errors import UsageError
from ...group import ProcessGroup
from ...group.group_argument import given_group
from .parameters import Parameters, average_parameters


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
        self.group = given_group(group, type(self).__name__)
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
