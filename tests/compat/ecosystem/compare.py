"""What a case gives on shoal's group, against what it gives on Gloo's.

A case is a function of a :class:`World`, whose group is the default group while it runs.  It returns
tensors (DTensors too), numbers and strings in any structure.  Each rank runs it over both, from
the same seeds, and compares.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from ..pool import Pool
from ..rank import Context


@dataclass
class World:
    """What a case runs on.

    Attributes:
        group: all ranks, over one backend or the other; the default group.
        rank, size: its own.
        scratch: an empty directory, the same one for all ranks.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    scratch: Path


Case = Callable[[World], Any]

#: largest difference between the backends, relative to a tensor's largest element, by the dtype of computing
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}


def same_as_gloo(pool: Pool, case: Case, dtype: torch.dtype = torch.float64) -> None:
    """Fails unless `case` gives the same over shoal as over Gloo, on every rank of the pool.

    Args:
        dtype: torch's default dtype on more than two ranks.
    """
    pool.run(on_both, case, dtype)


def on_both(context: Context, case: Case, dtype: torch.dtype) -> None:
    """What one rank does for :func:`same_as_gloo`.

    Raises:
        AssertionError: the results differ.  Two terms can be added in one order only (a + b is b + a), so two
            ranks' results must agree in every bit.  With more ranks the backends add in different orders.
            How far training drives that apart depends on the processor, so torch's default dtype is double
            then, and what :data:`ROUNDING` says is allowed.
    """
    two = context.size == 2
    with _default_dtype(torch.float32 if two else dtype):
        expected = _outcome(case, context, context.gloo, "gloo")
        actual = _outcome(case, context, context.group, "shoal")
    tolerance = 0.0 if two else ROUNDING[dtype]
    ours, our_form = _pytree.tree_flatten(actual)
    theirs, their_form = _pytree.tree_flatten(expected)
    assert our_form == their_form, f"{our_form} on shoal, {their_form} on Gloo"
    assert ours, "a case without a result shows nothing"
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        _same(one, other, tolerance, f"result {number} of {case.__name__}")


def on_shoal(context: Context, case: Callable[..., Any], *args: Any) -> Any:
    """What ``case(world, *args)`` gives over shoal alone."""
    return _outcome(lambda world: case(world, *args), context, context.group, "shoal")


def on_gloo(context: Context, case: Callable[..., Any], *args: Any) -> Any:
    """What ``case(world, *args)`` gives over Gloo alone."""
    return _outcome(lambda world: case(world, *args), context, context.gloo, "gloo")


def _outcome(case: Case, context: Context, group: Any, name: str) -> Any:
    scratch = context.scratch / name
    scratch.mkdir(exist_ok=True)
    world = World(group, context.rank, context.size, scratch)
    torch.manual_seed(0)
    with _default(group), _torch_keeps_quiet():
        return _pytree.tree_map(_plain, case(world))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _default(group: Any) -> Iterator[None]:
    """Makes `group`, which has all ranks, the one that torch takes where none is named."""
    before = distributed_c10d._get_default_group()
    distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)


@contextlib.contextmanager
def _torch_keeps_quiet() -> Iterator[None]:
    """Suppresses what torch says of its own deprecated and experimental parts, with either backend."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True):  # some insist on being shown
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module=r"shoal")
            yield
    finally:
        logger.setLevel(before)


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    if not isinstance(expected, torch.Tensor):
        assert actual == expected, f"{what}: {actual} on shoal, {expected} on Gloo"
        return
    largest = expected.abs().max().item() if tolerance and expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=0.0, atol=tolerance * largest, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
