"""The bytes of tensors, without numpy."""

from __future__ import annotations

import pickle

import pytest
import torch

from shoal.common.tensor_bytes import TensorBytes


def test_a_contiguous_tensor_is_viewed_in_place() -> None:
    whole = torch.arange(10, dtype=torch.int16)
    with TensorBytes(whole[3:5]) as view:
        assert view.readonly
        assert bytes(view) == b"\3\0\4\0"
        whole[3] = 9
        assert bytes(view) == b"\11\0\4\0"


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        (torch.arange(6.0).reshape(2, 3).t(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]),
        (torch.tensor([1 + 2j]).conj(), [1.0, -2.0]),
        (torch.tensor([1 + 2j]).conj().imag, [-2.0]),
        (torch.ones(2, requires_grad=True), [1.0, 1.0]),
        (torch.tensor(7.0), [7.0]),
        (torch.empty(0), []),
    ],
    ids=["transposed", "conjugated", "negated", "with gradient", "scalar", "empty"],
)
def test_the_bytes_are_those_of_the_values_in_order(tensor: torch.Tensor, values: list[float]) -> None:
    with TensorBytes(tensor) as view:
        assert view.nbytes == 4 * len(values)
        assert view.cast("f").tolist() == values


def test_the_view_cannot_be_used_after_the_block() -> None:
    with TensorBytes(torch.ones(4)) as view:
        pass
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_a_tensor_that_nothing_else_holds_lives_until_the_end_of_the_block() -> None:
    content = bytes(range(256)) * 4096
    with TensorBytes(torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)) as view:
        others = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(8)]
        assert pickle.loads(view) == content
        del others
