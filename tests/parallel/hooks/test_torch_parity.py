"""The hooks of torch, given the same buckets over Gloo, average to the same.

Some are not here, because torch's cannot run: its quantising hooks raise an IndexError with Gloo, and its
batched PowerSGD an AssertionError everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.parallel import hooks
from shoal.testing import run_processes
from tests.parallel.gloo import gloo

from .buckets import Model, norm

SHAPES = ((24, 40), (40,), (16, 24), (6, 36))


def _both(
    group: shoal.ProcessGroup,
    ours: tuple[Callable[..., Any], Any],
    theirs: tuple[Callable[..., Any], Any],
    dtype: torch.dtype = torch.float32,
) -> float:
    """How much the two differ, relative to the gradients; the largest of five steps."""
    own = Model(group, shapes=SHAPES, gap=0, dtype=dtype)
    other = Model(group, shapes=SHAPES, gap=0, dtype=dtype)
    worst = 0.0
    for _ in range(5):
        a, b = own.reduce(*ours), other.reduce(*theirs)
        worst = max(worst, norm([x - y for x, y in zip(a, b, strict=True)]) / norm(b))
    return worst


def _factors(rank: int) -> list[torch.Tensor]:
    """Second factors to begin with, equal on all ranks."""
    random = torch.Generator().manual_seed(5)
    return [torch.randn(rank, columns, generator=random, dtype=torch.float64) for columns in (40, 24, 36)]


def _power_sgd(module: Any, rank: int, **settings: Any) -> Any:
    """The states of both, which begin with the same factors."""
    factors = _factors(rank)
    ours = hooks.PowerSGDState(None, rank, 0, 1, **settings)
    theirs = module.PowerSGDState(None, rank, 2, 1, **settings)
    ours.factors = dict(zip((0, 2, 3), factors, strict=True))
    theirs.iter = 2  # it wants two passes before it begins
    theirs.p_memory_dict[0] = torch.empty(rank * (24 + 16 + 6), dtype=torch.float64)
    theirs.q_memory_dict[0] = torch.cat([factor.t().flatten() for factor in factors])
    return ours, theirs


def compare(group: shoal.ProcessGroup, path: str) -> dict[str, float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    torch.set_num_threads(1)
    result = {}
    with gloo(group, path, 30.0):
        for name in ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"):
            ours = getattr(hooks, name)
            result[name] = _both(group, (ours, None), (getattr(default_hooks, name), None))
        for rank in (1, 3):
            for feedback in (True, False):
                a, b = _power_sgd(powerSGD_hook, rank, use_error_feedback=feedback)
                result[f"powerSGD_hook {rank} {feedback}"] = _both(
                    group, (hooks.powerSGD_hook, a), (powerSGD_hook.powerSGD_hook, b), torch.float64
                )
    return result


def test_every_hook_averages_as_that_of_torch(tmp_path: Path) -> None:
    for differences in run_processes(compare, 2, str(tmp_path / "store")):
        for name, difference in differences.items():
            bound = {"allreduce": 1e-6, "fp16": 1e-3, "bf16": 1e-2}
            limit = bound.get(name.split("_")[0], 1e-9)
            assert difference < limit, f"{name}: {difference}"
        assert len(differences) == 7
