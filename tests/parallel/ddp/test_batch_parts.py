"""What is split among copies of a model and joined again, and how."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.parallel.ddp.copies import concatenate_outputs, move_to, split_batch

CPU = torch.device("cpu")

Pair = namedtuple("Pair", "left right")


def test_inputs_are_split_like_torch_splits_them() -> None:
    x = torch.arange(10).reshape(5, 2)
    parts = split_batch(((x, "word"), {"pair": Pair([x, 3], None), "scalar": torch.tensor(7)}), [CPU] * 3, 0)
    assert [len(args[0]) for args, _ in parts] == [2, 2, 1]
    for number, (args, kwargs) in enumerate(parts):
        assert torch.equal(args[0], x.chunk(3)[number])
        assert args[1] == "word"
        assert isinstance(kwargs["pair"], Pair)
        assert torch.equal(kwargs["pair"].left[0], args[0])
        assert kwargs["pair"].left[1:] == [3]
        assert kwargs["pair"].right is None
        assert kwargs["scalar"] == 7
    assert len(split_batch(x[:2], [CPU] * 3, 0)) == 2
    assert len(split_batch(x[:0], [CPU] * 3, 0)) == 1
    assert len(split_batch("no tensor", [CPU] * 3, 0)) == 1
    assert torch.equal(split_batch(x, [CPU] * 2, -1)[1], x[:, 1:])


def test_outputs_are_joined_like_torch_joins_them() -> None:
    outputs = [
        {
            "rows": torch.full((2, 3), number),
            "loss": torch.tensor(number),
            "other": (None, "word", Pair(1, 2)),
        }
        for number in range(2)
    ]
    joined = concatenate_outputs(outputs, CPU, 0)
    assert joined["rows"].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert joined["loss"].tolist() == [0, 1]
    assert joined["other"] == (None, "word", Pair(1, 2))
    assert concatenate_outputs(outputs, CPU, 1)["rows"].tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    assert concatenate_outputs([torch.tensor(1.0)], CPU, 0).tolist() == [1.0]


@pytest.mark.parametrize(
    ("inputs", "dim", "message"),
    [
        ((torch.ones(4, 2), torch.ones(1, 2)), 0, r"\[\[4, 2\], \[1, 2\]\] cannot be split along dim=0"),
        (torch.ones(4), 1, r"\[4\] has no dim=1"),
        (nn.utils.rnn.pack_sequence([torch.ones(2)]), 0, "PackedSequence"),
    ],
)
def test_what_cannot_be_split_is_refused(inputs: Any, dim: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_batch(inputs, [CPU] * 2, dim)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([(torch.ones(1), None), torch.ones(1)], "structures that differ: copy 0"),
        ([3, 4], "returned 3, 4: only tensors"),
        ([object(), object()], "an object of type object"),
    ],
)
def test_what_cannot_be_joined_is_refused(outputs: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        concatenate_outputs(outputs, CPU, 0)


def test_moving_reaches_every_tensor() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2)])
    there = move_to({"x": [torch.ones(1), "word"], "packed": packed}, torch.device("meta"))
    assert there["x"][0].device.type == "meta"
    assert there["x"][1] == "word"
    assert there["packed"].data.device.type == "meta"
