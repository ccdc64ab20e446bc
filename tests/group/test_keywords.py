"""Torch's names for arguments, and misspelt ones: the error says which name is meant."""

from __future__ import annotations

import datetime
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal import ProcessGroup, UsageError
from shoal.common.arguments import explain_unknown_keywords
from shoal.testing import run_threads

X = torch.ones(2)

CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "async_op": (
        lambda g: g.all_reduce(X, async_op=True),
        "all_reduce on rank 0 takes no argument 'async_op': every operation returns a future at once, and "
        "future.wait() waits for it.  It takes x, op, timeout",
    ),
    "group": (lambda g: g.barrier(group=g), "'group': the operation is a method of its group"),
    "process_group": (lambda g: g.all_reduce(X, process_group=g), "'process_group': the operation is a "),
    "dst of a broadcast": (lambda g: g.broadcast(X, dst=0), "'dst' (did you mean 'root'?)"),
    "two roots": (lambda g: g.broadcast(X, 1, src=0), "broadcast on rank 0: root=1 and src=0 are two names"),
    "no rank": (lambda g: g.reduce(X, dst=1), "reduce on rank 0: dst must be a rank of the group, 0 to 0"),
    "gather_list": (lambda g: g.gather(X, gather_list=[X]), "'gather_list' (did you mean 'out'?)"),
    "scatter_list": (lambda g: g.scatter(X, scatter_list=[X]), "'scatter_list' (did you mean 'inputs'?)"),
    "splits": (lambda g: g.all_to_all_single(X, X, input_split_sizes=[2]), "(did you mean 'input_splits'?)"),
    "misspelt": (lambda g: g.all_gather_single(X, X, timout=3), "'timout' (did you mean 'timeout'?)"),
    "nothing like it": (lambda g: g.split(0, zzz=3), r"'zzz'.  It takes color, key, timeout"),
    "receive": (
        lambda g: g.recv(X, group_src=0),
        "recv on rank 0 takes no argument 'group_src' (did you mean 'src'?)",
    ),
    "timedelta": (
        lambda g: g.barrier(timeout=datetime.timedelta(seconds=1)),
        "timeout=datetime.timedelta(seconds=1) on rank 0: expected a positive number of seconds; pass its ",
    ),
    "mean": (lambda g: g.all_reduce(X, op="mean"), "unknown reduction 'mean' (did you mean 'avg'?)"),
    "number": (lambda g: g.all_reduce(X, op=3), "unknown reduction 3; expected a reduction such as ReduceOp"),
    "torch's premul_sum": (
        lambda g: g.all_reduce(X, dist.ReduceOp.PREMUL_SUM),
        "op=PREMUL_SUM: the factor is missing",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_says_the_name_that_is_meant_and_the_group_stays_usable(name: str) -> None:
    call, text = CALLS[name]

    def rank(group: ProcessGroup) -> list[float]:
        with pytest.raises(UsageError, match=re.escape(text)):
            call(group)
        return group.all_reduce(torch.ones(1)).wait().tolist()

    assert run_threads(rank, 1) == [[1.0]]


def test_torch_s_names_of_roots_and_reductions_are_taken() -> None:
    def rank(group: ProcessGroup) -> None:
        me, x = group.rank, torch.tensor([group.rank + 1.0])
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.RedOpType.MAX, "MAX", "max", shoal.ReduceOp.MAX):
            assert group.all_reduce(x.clone(), op).wait().item() == 2.0
        halved = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
        assert group.all_reduce(x.clone(), halved).wait().item() == 1.5
        assert group.broadcast(x.clone(), src=1).wait().item() == 2.0
        assert group.reduce(x.clone(), dst=1).wait() == (torch.tensor([3.0]) if me == 1 else None)
        assert (group.gather(x, dst=1).wait() is None) == (me == 0)
        parts = [torch.tensor([5.0]), torch.tensor([6.0])] if me == 1 else None
        assert group.scatter(x.clone(), parts, src=1).wait().item() == 5.0 + me
        assert group.broadcast_object(me, src=1).wait() == 1
        assert group.gather_object(me, dst=1).wait() == ([0, 1] if me == 1 else None)
        assert group.scatter_object([2, 3] if me == 1 else None, src=1).wait() == 2 + me

    run_threads(rank, 2)


def test_every_operation_refuses_what_it_does_not_take() -> None:
    operations = [
        name
        for name, method in inspect.getmembers(ProcessGroup, inspect.isfunction)
        if not name.startswith("_") and "timeout" in inspect.signature(method).parameters
    ]
    assert len(operations) > 20

    def rank(group: ProcessGroup) -> None:
        for name in operations:
            if name == "close":
                continue
            method = getattr(group, name)
            needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
            given = [X for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
            with pytest.raises(
                UsageError,
                match=rf"{name} on rank 0 takes no argument 'timeuot' \(did you mean 'timeout'\?\)",
            ):
                method(*given, timeuot=3)

    run_threads(rank, 1)


def test_pg_options_are_named_as_such() -> None:
    with pytest.raises(UsageError, match=r"'concurency' \(did you mean 'concurrency'\?\)"):
        shoal.distributed.init_process_group(pg_options={"concurency": 2})
    assert not shoal.distributed.is_initialized()


def test_what_a_decorated_function_takes_is_still_seen() -> None:
    @explain_unknown_keywords(lambda name, *_: f"function {name}")
    def scale(x: float, *, by: float = 2) -> float:
        """Docstring."""
        return x * by

    assert list(inspect.signature(scale).parameters) == ["x", "by"]
    assert scale.__doc__ == "Docstring."
    assert scale(3, by=3) == 9
    with pytest.raises(TypeError, match=r"function scale takes no argument 'bye' \(did you mean 'by'\?\)\."):
        scale(3, bye=3)  # type: ignore[call-arg]
