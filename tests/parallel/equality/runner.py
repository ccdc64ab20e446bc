"""Trains every case with both wrappers, and once more in double precision, in the same processes."""

from __future__ import annotations

import hashlib
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchWrapper
from torch.utils import _pytree

import shoal
import shoal.parallel.hooks

from ..gloo import gloo

# Imported because they list their cases.
from . import dense, graphs, joining, procedures, sequences, sparse, unused  # noqa: F401
from .case import CASES, Case

STEPS = 12

#: seconds for one operation; the others of a rank that failed alone must not wait for long
OPERATION = 30.0


@dataclass
class Training:
    """What one wrapper made of a case on one rank.

    Attributes:
        losses: of every step.
        state: the module's parameters and buffers in the end, by name.
        parameters: digest of the bytes of all parameters in the end.
        buffers: digests of all buffers as each forward pass found them.
        ending: digest of the buffers in the end.
        absent: for each step the parameters without a gradient when the optimiser took its step.
    """

    losses: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: str = ""
    buffers: list[str] = field(default_factory=list)
    ending: str = ""
    absent: list[tuple[str, ...]] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of a case on one rank.

    Attributes:
        failure: the traceback, or "".
        shoal: the training with shoal's wrapper.
        torch: the one with torch's.
        exact: the one with torch's where everything is computed and sent in double precision; left out where
            the two others must be equal in every bit.
    """

    failure: str = ""
    shoal: Training = field(default_factory=Training)
    torch: Training = field(default_factory=Training)
    exact: Training = field(default_factory=Training)


def outcomes(group: shoal.ProcessGroup, meeting: str, names: Sequence[str]) -> dict[str, Outcome]:
    """Run cases on this rank.

    Args:
        meeting: path of a file that does not exist yet, where Gloo's ranks meet.
        names: of the cases.
    """
    with gloo(group, meeting, OPERATION, one_thread=True):
        return {name: _outcome(CASES[name], group) for name in names}


def same_bits(kind: type[Case], size: int) -> bool:
    """Whether both trainings must be equal in every bit."""
    return size == 2 and kind.same_bits


def _outcome(kind: type[Case], group: shoal.ProcessGroup) -> Outcome:
    outcome = Outcome()
    trainings: dict[str, Callable[..., Training]] = {"shoal": _train_by_shoal, "torch": _train_by_torch}
    if not same_bits(kind, group.size):
        trainings["exact"] = lambda *both: _train_by_torch(*both, None, in_double)
    for name, train in trainings.items():
        try:
            setattr(outcome, name, train(kind, group))
        except Exception:
            outcome.failure = traceback.format_exc()
        failures = group.all_reduce(torch.tensor(int(outcome.failure != ""))).wait()
        if failures.item():
            break
    return outcome


def _train_by_shoal(kind: type[Case], group: shoal.ProcessGroup) -> Training:
    # In a group of its own, which an exception aborts, so that a case that fails spoils no other.
    with group.split(0) as own:
        return _train(kind, group, partial(shoal.DistributedDataParallel, group=own), shoal.parallel.hooks)


def _train_by_torch(kind: type[Case], group: shoal.ProcessGroup, *exactly: Any) -> Training:
    with warnings.catch_warnings():  # broadcast_buffers has another name from torch 2.13 on
        warnings.simplefilter("ignore", FutureWarning)
        return _train(kind, group, TorchWrapper, *(exactly or (default_hooks,)))


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in double precision, or the tensor itself if it holds integers."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _train(
    kind: type[Case],
    group: shoal.ProcessGroup,
    wrapper: Callable[..., nn.Module],
    hooks: ModuleType | None,
    convert: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Training:
    """Train a case.

    Args:
        wrapper: DistributedDataParallel.
        hooks: where the case's communication hook is; None: train without it.
        convert: applied to every parameter, buffer and tensor of a batch before the training.
    """
    training = Training()
    case = kind(group.rank, group.size)
    torch.manual_seed(group.rank)  # other parameters on each rank: wrapping gives all of them rank 0's
    module = case.build()._apply(convert)
    if any(True for _ in module.buffers()):
        module.register_forward_pre_hook(lambda own, _: training.buffers.append(_digest(own.buffers())))
    model = case.wrap(module, wrapper)
    if case.hook and hooks is not None:
        model.register_comm_hook(None, getattr(hooks, case.hook))
    optimizer = case.optimizer(model)

    def note_absent(*_: Any) -> None:
        training.absent.append(
            tuple(name for name, parameter in module.named_parameters() if parameter.grad is None)
        )

    optimizer.register_step_pre_hook(note_absent)
    random = torch.Generator().manual_seed(1000 + group.rank)
    batches = _pytree.tree_map_only(torch.Tensor, convert, [case.batch(random) for _ in range(case.distinct)])
    training.losses = case.train(model, optimizer, batches, STEPS)
    training.state = {
        name: tensor.detach().clone()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    training.parameters = _digest(module.parameters())
    training.ending = _digest(module.buffers())
    return training


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
