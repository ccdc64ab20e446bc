"""An optimiser that averages the model periodically after its own step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ...errors import UsageError
from .averagers import ModelAverager


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
