"""Bad input raises at the call, says what was expected, sends nothing and leaves the group usable."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.errors import UnsupportedOperation, UsageError
from shoal.group import ProcessGroup
from shoal.spec import ReduceOp

from .null_backend import null_group

ones = torch.ones(4)
four = [torch.ones(2) for _ in range(4)]
expanded = torch.ones(1).expand(4)
sparse = torch.eye(3).to_sparse()


class Wrapper(torch.Tensor):
    """A tensor that stands for others, as a DTensor does."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} of a wrapper")


wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (4,))
freed = torch.ones(4)
freed.untyped_storage().resize_(0)

# Rank 1 of 4 calls it, and the message says so.
BAD: list[tuple[str, Callable[[ProcessGroup], Any], str]] = [
    ("not a tensor", lambda g: g.all_reduce([1.0]), "x must be a torch.Tensor, got list"),
    ("sparse", lambda g: g.all_reduce(sparse), "dense tensor, got layout sparse_coo"),
    ("wrapper", lambda g: g.all_reduce(wrapper), "x is a Wrapper, which has no memory of its own"),
    ("wrapped part", lambda g: g.all_gather([wrapper] * 4, ones), "out[0] is a Wrapper, which has no memory"),
    ("freed", lambda g: g.all_reduce(freed), "x has no memory of its own: its storage was freed"),
    ("freed output", lambda g: g.all_gather_single(freed, torch.ones(1)), "out has no memory of its own"),
    (
        "under vmap",
        lambda g: torch.vmap(lambda x: g.all_reduce(x).wait())(torch.ones(2, 4)),
        "x has no memory of its own",
    ),
    ("nested", lambda g: g.broadcast(torch.nested.nested_tensor([ones])), "dense tensor, got layout nested"),
    (
        "meta device",
        lambda g: g.all_reduce(ones.to("meta")),
        "x is on meta, but the group takes tensors on cpu",
    ),
    (
        "memory elsewhere",
        lambda g: g.empty(3, device="meta"),
        "device is meta, but the group takes tensors on cpu",
    ),
    ("expanded output", lambda g: g.all_reduce(expanded), "several elements at one address"),
    ("expanded target", lambda g: g.recv(expanded, 0), "several elements at one address"),
    ("unknown reduction", lambda g: g.all_reduce(ones, "mean"), "unknown reduction 'mean'"),
    ("illegal reduction", lambda g: g.all_reduce(ones, "bxor"), "BXOR has no meaning for torch.float32"),
    (
        "illegal premul",
        lambda g: g.reduce(ones.int(), 0, ReduceOp.premul_sum(2)),
        "PREMUL_SUM has no meaning",
    ),
    ("only copied", lambda g: g.all_reduce(ones.to(torch.float8_e5m2)), "copied but not reduced"),
    ("root too large", lambda g: g.broadcast(ones, 4), "root must be a rank of the group, 0 to 3, got 4"),
    ("root negative", lambda g: g.reduce(ones, -1), "root must be a rank of the group, 0 to 3, got -1"),
    ("root of a wrong type", lambda g: g.gather(ones, root=1.0), "root must be a rank"),
    (
        "too few outputs",
        lambda g: g.all_gather(four[:3], ones),
        "out must be a list of 4 tensors, one per rank, got 3",
    ),
    ("a tensor as list", lambda g: g.all_gather(ones, ones), "out must be a list of 4 tensors, got Tensor"),
    ("an input before the outputs", lambda g: g.all_gather(ones, four), "x must be a torch.Tensor, got list"),
    (
        "own part too short",
        lambda g: g.all_gather(four, ones),
        r"out[1] has 2 elements, expected 4 (the size of x)",
    ),
    (
        "one output 4 times",
        lambda g: g.all_gather([ones.clone()] * 4, ones),
        "out[0] and out[1] lie in the same memory",
    ),
    (
        "mixed dtypes",
        lambda g: g.all_gather([*four[:3], torch.ones(2).int()], ones),
        "out[3] has dtype torch.int32",
    ),
    (
        "gather single",
        lambda g: g.all_gather_single(torch.ones(15), ones),
        "out has 15 elements, expected 16",
    ),
    ("gather dtype", lambda g: g.all_gather_single(torch.ones(16).int(), ones), "but x has torch.float32"),
    ("scatter size", lambda g: g.reduce_scatter(torch.ones(3), four), "out has 3 elements, expected 2"),
    (
        "scatter single",
        lambda g: g.reduce_scatter_single(torch.ones(3), ones),
        "x has 4 elements, expected 12",
    ),
    ("gather elsewhere", lambda g: g.gather(ones, four, root=0), "only root, rank 0, passes out"),
    (
        "gather sizes",
        lambda g: g.gather(ones, root=1, sizes=[2**64, 4, 4, 4]),
        "must be counts of elements that fit in memory",
    ),
    (
        "gather sizes",
        lambda g: g.gather(ones, sizes=[4.5, 4, 4, 4]),
        "sizes must be 4 integers, one per rank",
    ),
    ("gather sizes", lambda g: g.gather(ones, sizes=[4, 3, 4, 4]), "x has 4 elements, but sizes[1] is 3"),
    ("scatter nothing", lambda g: g.scatter(ones, root=1), "root must pass inputs, a list of 4 tensors"),
    ("scatter elsewhere", lambda g: g.scatter(ones, four, 0), "only root, rank 0, passes inputs"),
    ("scatter parts", lambda g: g.scatter(ones, four, 1), "inputs[0] has 2 elements, expected 4"),
    (
        "exchange own",
        lambda g: g.all_to_all([torch.ones(3) for _ in "1234"], four),
        "out[1] has 3 elements, expected 2",
    ),
    (
        "indivisible",
        lambda g: g.all_to_all_single(torch.ones(6), torch.ones(6)),
        "is not divisible by 4 ranks; pass input_splits",
    ),
    ("wrong splits", lambda g: g.all_to_all_single(ones, ones, [1, 1, 1, 2]), "output_splits add up to 5"),
    ("negative splits", lambda g: g.all_to_all_single(ones, ones, [1, -1, 2, 2]), "none negative"),
    (
        "rows differ",
        lambda g: g.all_to_all_single(torch.ones(4, 2), torch.ones(4, 3)),
        "3 elements in x (shape (4, 3)), but 2 in out",
    ),
    ("no dimension", lambda g: g.all_to_all_single(torch.tensor(1.0), ones), "at least one dimension"),
    ("send to self", lambda g: g.send(ones, 1), "dst is this rank itself"),
    ("send nowhere", lambda g: g.send(ones, 9), "dst must be a rank of the group"),
    ("receive from self", lambda g: g.recv(ones, 1), "src is this rank itself"),
    ("tag too large", lambda g: g.send(ones, 0, 2**30), "tag must be an integer from 0"),
    ("tag negative", lambda g: g.recv(None, 0, -1), "tag must be an integer from 0"),
    (
        "timeout of zero",
        lambda g: g.barrier(timeout=0),
        "timeout=0 on rank 1: expected a positive number of seconds",
    ),
    (
        "timeout of a wrong type",
        lambda g: g.send(ones, 0, timeout="1"),
        "expected a positive number of seconds",
    ),
    (
        "timeout not a number",
        lambda g: g.all_reduce(ones, timeout=float("nan")),
        "expected a positive number of seconds",
    ),
    ("object timeout", lambda g: g.all_gather_object(1, timeout=-1), "expected a positive number of seconds"),
    ("objects elsewhere", lambda g: g.scatter_object([1] * 4, 0), "only root, rank 0, passes objects"),
    ("too few objects", lambda g: g.scatter_object([1] * 3, 1), "one object per rank, 4, got 3"),
    ("empty dtype", lambda g: g.empty(3, dtype=torch.qint8), "cannot be sent"),
    ("empty shape", lambda g: g.empty(3, -1), "negative dimension"),
    ("color", lambda g: g.split("red"), "color must be a 64-bit integer or None, got 'red'"),
    ("not a member", lambda g: g.subgroup([0, 2]), "this rank is not among the ranks [0, 2]"),
    ("a rank twice", lambda g: g.subgroup([1, 1]), "names a rank twice"),
    ("no such rank", lambda g: g.subgroup([1, 4]), "must be a rank of the group"),
]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_raises_before_anything_is_sent(call: Callable[[ProcessGroup], Any], message: str) -> None:
    group, channel = null_group()
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        call(group)
    if "timeout" not in message and "reduction '" not in message:
        assert "on rank 1: " in str(caught.value)
    assert channel.operations == []
    group.barrier()
    assert [operation.number for operation in channel.operations] == [0]
    group.close()


meta = torch.ones(4, device="meta")
metas = [torch.ones(4, device="meta") for _ in range(4)]
#: every operation with a tensor on a device that the group does not have, as an input and as an output
ELSEWHERE: dict[str, Callable[[ProcessGroup], Any]] = {
    "all_reduce": lambda g: g.all_reduce(meta),
    "reduce": lambda g: g.reduce(meta, 0),
    "broadcast": lambda g: g.broadcast(meta, 0),
    "all_gather": lambda g: g.all_gather(meta),
    "all_gather out": lambda g: g.all_gather(metas, ones),
    "all_gather_single": lambda g: g.all_gather_single(torch.ones(16), meta),
    "all_gather_single out": lambda g: g.all_gather_single(torch.ones(16, device="meta"), ones),
    "reduce_scatter": lambda g: g.reduce_scatter(ones, metas),
    "reduce_scatter out": lambda g: g.reduce_scatter(meta, [torch.ones(4) for _ in range(4)]),
    "reduce_scatter_single": lambda g: g.reduce_scatter_single(torch.ones(1), meta),
    "gather": lambda g: g.gather(meta, 0),
    "scatter": lambda g: g.scatter(meta, root=0),
    "all_to_all": lambda g: g.all_to_all(metas, [torch.ones(4) for _ in range(4)]),
    "all_to_all_single": lambda g: g.all_to_all_single(torch.ones(4), meta),
    "send": lambda g: g.send(meta, 0),
    "recv": lambda g: g.recv(meta, 0),
    "empty": lambda g: g.empty(4, device="meta"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_tensor_on_another_device_is_refused_before_anything_is_sent(name: str) -> None:
    group, channel = null_group()
    expected = (
        f"{name.split()[0]} on rank 1: .* meta, but the group takes tensors on cpu; copy the tensor there, "
        "or create the group with a backend for meta"
    )
    with pytest.raises(UsageError, match=expected):
        ELSEWHERE[name](group)
    assert channel.operations == []
    group.close()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_has_no_meaning_is_an_unsupported_operation() -> None:
    group, _ = null_group()
    for call in (
        lambda: group.all_reduce(torch.ones(2, dtype=torch.complex64), "min"),
        lambda: group.all_reduce(sparse),
        lambda: group.all_reduce(torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)),
    ):
        with pytest.raises(UnsupportedOperation):
            call()
    group.close()
