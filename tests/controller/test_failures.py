"""Operations that fail, and what becomes of those that depend on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.controller import Master

NODE = "node:0"


def _fails(device: str = NODE) -> torch.Tensor:
    """A tensor that cannot be computed, which only the node finds out."""
    table = torch.ones(3, 2, device=device)
    return table[torch.tensor([7], device=device)]  # the line that fails


def test_shapes_that_do_not_fit_are_refused_at_once(master: Master) -> None:
    with pytest.raises(RuntimeError, match="4"):
        torch.ones(3, device=NODE) + torch.ones(4, device=NODE)
    with pytest.raises(RuntimeError):
        torch.ones(2, 3, device=NODE) @ torch.ones(2, 3, device=NODE)


def test_a_failure_names_operation_node_and_line(master: Master) -> None:
    lost = _fails()
    with pytest.raises(shoal.RemoteOpError) as caught:
        lost.cpu()
    error = caught.value
    assert error.worker == "node0"
    assert "test_failures.py" in error.line
    assert "the line that fails" in error.line
    assert "aten.index.Tensor(float32[3, 2], int64[1])" in str(error)
    assert "IndexError" in error.traceback


def test_the_error_of_an_operation_in_backward_has_the_line_of_backward(master: Master) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 1

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient[torch.full((2,), 9, device=NODE)]

    x = torch.ones(2, device=NODE, requires_grad=True)
    Bad.apply(x).sum().backward()
    assert x.grad is not None
    with pytest.raises(shoal.RemoteOpError) as caught:
        x.grad.tolist()
    assert "in backward: return gradient[" in caught.value.line


def test_what_depends_on_a_failure_fails_with_it_and_the_rest_goes_on(master: Master) -> None:
    good = torch.ones(3, device=NODE)
    bad = _fails()
    for _ in range(10_000):
        good = good + 1
    worse = (bad * 2).sum() + good.sum()
    assert good.tolist() == [10_001] * 3
    with pytest.raises(shoal.RemoteOpError, match="the line that fails"):
        worse.item()
    assert (good + 1)[0].item() == 10_002


def test_writing_a_failure_into_a_tensor_poisons_all_that_shares_its_memory(master: Master) -> None:
    base = torch.zeros(4, device=NODE)
    view, other = base[:2], torch.zeros(2, device=NODE)
    base.add_(_fails()[0, 0])
    for tensor in (base, view, view + 1):
        with pytest.raises(shoal.RemoteOpError):
            tensor.tolist()
    assert other.tolist() == [0, 0]


def test_synchronize_raises_what_nobody_has_seen_once(master: Master) -> None:
    lost = [_fails(), _fails()]
    with pytest.raises(shoal.RemoteOpError, match="1 more failed"):
        master.synchronize()
    master.synchronize()
    with pytest.raises(shoal.RemoteOpError):
        lost[1].tolist()


def test_an_assertion_that_fails_on_the_node_is_raised_at_the_next_wait(master: Master) -> None:
    x = torch.ones(1, device=NODE)
    torch._assert_async(x == 2)
    with pytest.raises(shoal.RemoteOpError, match="_assert_async"):
        x.item()
    assert x.item() == 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x: torch.linalg.cholesky(-x), "not positive-definite"),
        (lambda x: torch.linalg.solve(x * 0, x), "singular"),
    ],
)
def test_what_did_not_pass_its_check_is_poison(master: Master, make: Any, match: str) -> None:
    x = torch.eye(2, device=NODE)
    step = master.recorded(lambda each: make(each) * 2)
    right = torch.eye(2, device=NODE) * (-1 if "definite" in match else 1)
    for call in (lambda each: make(each) * 2, step, step, step, step):
        made = call(x)
        for each in (made, made + 1):
            for _ in range(2):
                with pytest.raises(shoal.RemoteOpError, match=match):
                    each.cpu()
    assert step.replays
    if "definite" in match:
        assert step(right)[0, 0].item() == 2
    assert x.sum().item() == 2


def test_an_operation_that_is_asked_raises_at_once(master: Master) -> None:
    with pytest.raises(shoal.RemoteOpError, match="the line that fails"):
        _fails().nonzero()


def test_what_failed_on_one_node_does_not_concern_another(master: Master) -> None:
    bad, good = _fails("node:0"), torch.ones(2, device="node:1")
    assert (good * 2).tolist() == [2, 2]
    with pytest.raises(shoal.RemoteOpError):
        bad.tolist()
