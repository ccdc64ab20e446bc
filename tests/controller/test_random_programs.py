"""Random programs of views, writes and mixed dtypes do and refuse on a node what they do and refuse here."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shoal.controller import Master
from tests.controller.compare import differences

NODE = "node:0"
#: programs of the long form
MANY = 500
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16]
#: numbers that every dtype holds, and others.  Whether an integer holds a number is a question of elements,
#: which the node answers later: a program asks it of no integers.
HELD: list[Any] = [0, 1, 3, True]
SCALARS: list[Any] = [*HELD, -3, 2.5, 0.1, 2**31, 2**53 + 1, float("inf"), float("nan")]

Tensor = torch.Tensor

VIEWS: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, n: x.t() if x.dim() == 2 else x.unsqueeze(0),
    lambda x, n: x[n % max(len(x), 1) :] if x.dim() else x.view(1),
    lambda x, n: x[..., ::2] if x.dim() else x.reshape(1, 1),
    lambda x, n: x.flatten(),
    lambda x, n: x.unsqueeze(-1).expand(*x.shape, 2) if x.dim() < 2 else x.select(1, 0) if x.shape[1] else x,
    lambda x, n: x.reshape(-1),
    lambda x, n: x.diagonal() if x.dim() == 2 else x.detach(),
    lambda x, n: x.chunk(2)[-1] if x.dim() else x,
    lambda x, n: x.contiguous(),
    lambda x, n: x.squeeze(),
    lambda x, n: x.view(torch.int32),
    lambda x, n: x.view(-1),
]
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.clone,
    torch.neg,
    torch.abs,
    torch.sum,
    torch.zeros_like,
    torch.sign,
    torch.logical_not,
    torch.bitwise_not,
    torch.sqrt,
    torch.relu,
    lambda x: x.amax(),
    lambda x: x.sort(-1).values,
    lambda x: x.nonzero(),
    lambda x: x.mean(),
    lambda x: x.cumsum(0),
]
BINARY: list[Callable[..., Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.eq,
    torch.lt,
    torch.div,
    torch.bitwise_and,
    torch.matmul,
    lambda x, y: torch.where(x != 0, x, y),
    lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
    lambda x, y: torch.add(x, y, out=torch.empty(0, dtype=torch.result_type(x, y), device=x.device)),
]
WRITES: list[Callable[[Tensor, Any], Any]] = [
    lambda x, y: x.add_(y),
    lambda x, y: x.sub_(y),
    lambda x, y: x.mul_(y),
    lambda x, y: x.copy_(y) if isinstance(y, Tensor) else x.fill_(y),
    lambda x, y: x.__setitem__(0, y),
    lambda x, y: x.zero_(),
    lambda x, y: x.__setitem__(x != 0, 1),
    lambda x, y: x.masked_fill_(x == 0, 1),
    lambda x, y: x.transpose_(0, -1),
    lambda x, y: torch.sub(x.clone(), y, out=x),
    lambda x, y: x.clamp_(max=y),
]
KINDS = ["make", "unary", "binary", "scalar", "cast", "look"] + ["view", "write", "free"] * 3


def _scalar(choose: random.Random, x: Tensor) -> Any:
    return choose.choice(SCALARS if x.is_floating_point() else HELD)


def step(
    kind: str,
    choose: random.Random,
    x: Tensor,
    y: Tensor,
    device: str,
    unary: Sequence[Any] = UNARY,
    writes: Sequence[Any] = WRITES,
) -> Tensor | None:
    """Take a step with two of the program's tensors; the new one that it gives."""
    if kind == "make":
        shape = choose.randint(0, 3), choose.choice([1, 3])
        return torch.full(shape, choose.choice(HELD), dtype=choose.choice(DTYPES), device=device)
    if kind == "view":
        return choose.choice(VIEWS)(x, choose.randint(0, 5))
    if kind == "unary":
        return choose.choice(unary)(x)
    if kind == "binary":
        return choose.choice(BINARY)(x, y)
    if kind == "scalar":
        return choose.choice(BINARY[:3])(x, _scalar(choose, x))
    if kind == "cast":
        return x.to(choose.choice(DTYPES[:2] if x.is_floating_point() else DTYPES))
    # Whether two tensors have memory in common only their node knows: it refuses some of these writes later.
    choose.choice(writes)(x, choose.choice([y.clone(), _scalar(choose, x)]))
    return None


def _run(seed: int, device: str) -> list[Any]:
    """A program over a list of tensors: what it saw, the kinds of its errors, and what it leaves."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    values: list[Tensor] = [
        torch.arange(6.0).reshape(2, 3).to(device),
        torch.ones(3, dtype=torch.int64).to(device),
        torch.tensor([True, False, True]).to(device),
    ]
    said: list[Any] = []
    for _ in range(choose.randint(5, 40)):
        kind = choose.choice(KINDS)
        at, other, seed = choose.randrange(len(values)), choose.randrange(len(values)), choose.random()
        if kind == "free":
            if len(values) > 1:
                del values[at]
            if seed < 0.1:
                gc.collect(0)
        elif kind == "look":
            said.append(values[at].reshape(-1)[0].item() if values[at].numel() else None)
        else:
            try:
                made = step(kind, random.Random(seed), values[at], values[other], device)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                # In torch 2.15 a kernel for metadata raises the parent class of what the kernel raises.
                said.append(type(error).__name__.replace("NotImplementedError", "RuntimeError"))
                continue
            if made is not None:
                values.append(made)
            del made
    return [[repr(each) for each in said], values]


def _differences(master: Master, seeds: Sequence[int]) -> list[str]:
    """What the programs of these seeds do otherwise on a node, in words."""
    found = []
    for seed in seeds:
        try:
            wrong = differences(master, _run(seed, "cpu"), _run(seed, NODE))
            master.synchronize()
        except RuntimeError as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            found.append(f"program {seed}: {'; '.join(wrong)}")
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch deprecates some of what programs may do
def test_programs_do_on_a_node_what_they_do_here(master: Master) -> None:
    assert not _differences(master, range(60))


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch deprecates some of what programs may do
def test_many_programs_do_on_a_node_what_they_do_here(master: Master) -> None:
    assert not _differences(master, range(60, 60 + MANY))
