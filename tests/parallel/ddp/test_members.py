"""Parameters and buffers of every kind: sent, refused by name on all ranks, or ignored."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ModelMismatch, UsageError
from shoal.testing import run_threads
from tests.parallel.models import mlp
from tests.parallel.training import on_ranks, wrapped


def _quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class _Logged(torch.Tensor):
    """A class whose tensors take no part in operations with others."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in func.name():
            raise TypeError("no copies")
        return func(*args, **(kwargs or {}))


def _of_a_class() -> torch.Tensor:
    return torch.Tensor._make_subclass(_Logged, torch.ones(3))


#: what a broadcast cannot overwrite, and what its refusal says
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "coo": (lambda: torch.eye(3).to_sparse(), "its layout is torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "its layout is torch.sparse_csr"),
    "nested": (_nested, "it is a nested tensor"),
    "quantised": (_quantised, "it is quantised"),
    "meta": (lambda: torch.ones(3, device="meta"), "it is on the meta device"),
    "class": (_of_a_class, "it is a _Logged that cannot be copied to"),
}


def _with(tensor: torch.Tensor, *, parameter: bool = False) -> Any:
    model = mlp()
    if parameter:
        model.register_parameter("odd", nn.Parameter(tensor, requires_grad=False))
    else:
        model.register_buffer("odd", tensor)
    return model


def _refusals(make: Callable[[int], nn.Module], size: int = 3) -> list[BaseException]:
    """What every rank raises when it wraps its module; then the group is still whole."""

    def wrap(group: shoal.ProcessGroup) -> BaseException:
        with pytest.raises((UsageError, ModelMismatch)) as raised:
            wrapped(group, make(group.rank))
        group.barrier().wait()
        return raised.value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch: some kinds of tensors are not complete yet
        return run_threads(wrap, size)


@pytest.mark.parametrize("parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_sent_is_refused_by_name_on_all_ranks(kind: str, parameter: bool) -> None:
    make, reason = REFUSED[kind]
    if parameter and kind in ("class", "quantised"):
        pytest.skip("torch makes no such parameter")
    for error in _refusals(lambda _: _with(make(), parameter=parameter)):
        assert isinstance(error, UsageError)
        assert f"{'parameter' if parameter else 'buffer'} 'odd': " in str(error)
        assert reason in str(error)
        assert "params_and_buffers_to_ignore" in str(error)


@pytest.mark.parametrize("kind", REFUSED)
def test_where_one_rank_alone_has_it_the_others_are_not_left_waiting(kind: str) -> None:
    make, reason = REFUSED[kind]
    errors = _refusals(lambda rank: _with(make() if rank == 1 else torch.ones(3)))
    assert reason in str(errors[1])
    for other in (errors[0], errors[2]):
        assert isinstance(other, ModelMismatch)
        assert "rank 1" in str(other)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "has no shape yet"),
        (lambda: mlp().requires_grad_(False), "there is nothing to train"),
    ],
    ids=["lazy", "frozen"],
)
def test_a_model_that_one_rank_cannot_wrap_fails_everywhere(make: Any, reason: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lazy modules are new, torch says
        errors = _refusals(lambda rank: make() if rank == 1 else mlp())
    assert isinstance(errors[1], UsageError)
    assert reason in str(errors[1])
    assert all(isinstance(other, ModelMismatch) and reason in str(other) for other in (errors[0], errors[2]))


@on_ranks(3)
def test_tensors_of_unusual_memory_get_the_values_of_rank_0(group: shoal.ProcessGroup) -> None:
    number = float(group.rank + 1)
    model = mlp()
    model.register_buffer("expanded", torch.tensor([[number], [number + 1]]).expand(2, 3))
    model.register_buffer("all", torch.tensor(number).expand(4))
    model.register_buffer("waves", torch.tensor([number + 1j]).conj())
    model.register_buffer("negative", torch.tensor([number + number * 1j]).conj().imag)
    with torch.inference_mode():
        model.register_buffer("inference", torch.tensor([number]))
    model.register_buffer("turned", torch.full((2, 3), number).t())
    model.register_parameter("frozen", nn.Parameter(torch.tensor(number).expand(3), requires_grad=False))
    wrapper = wrapped(group, model)
    for _ in range(2):
        assert model.expanded.tolist() == [[1.0] * 3, [2.0] * 3]
        assert model.all.tolist() == [1.0] * 4
        assert model.waves.tolist() == [1 - 1j]
        assert model.negative.tolist() == [-1.0]
        assert model.inference.tolist() == [1.0]
        assert model.turned.tolist() == [[1.0, 1.0]] * 3
        assert model.frozen.tolist() == [1.0] * 3
        with torch.no_grad():
            model.all[:1].fill_(number)
            model.waves.copy_(torch.tensor([number - 1j]))
        wrapper(torch.ones(2, 6, dtype=torch.float64)).sum().backward()


def _ignoring(rank: int) -> Any:
    model = mlp()
    model.register_buffer("table", torch.full((1 + rank,), float(rank)))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_parameter("own", nn.Parameter(torch.full((2,), float(rank))))
    return model


IGNORED = ["table", "sparse", "own", "0.bias"]


@pytest.mark.parametrize("by_attribute", [False, True], ids=["option", "attribute"])
@pytest.mark.parametrize("precision", [None, shoal.MixedPrecision(param_dtype=torch.float64)])
@on_ranks(2)
def test_what_is_ignored_stays_with_its_rank(
    group: shoal.ProcessGroup, by_attribute: bool, precision: shoal.MixedPrecision | None
) -> None:
    options: dict[str, Any] = {"mixed_precision": precision}
    model = _ignoring(group.rank)
    if by_attribute:
        ddp: Any = nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(model, [".own", *IGNORED[:2], "0.bias"])
    else:
        options = {**options, "params_and_buffers_to_ignore": IGNORED}
    wrapper = wrapped(group, model, **options)
    assert model.table.tolist() == [float(group.rank)] * (1 + group.rank)
    assert model.own.tolist() == [float(group.rank)] * 2
    with wrapper.join():
        for step in range(1 + group.rank):
            wrapper.zero_grad()
            loss = wrapper(torch.ones(2, 6, dtype=torch.float64)).sum().double() * (1 + group.rank)
            (loss + model.own.sum() * (1 + group.rank)).backward()
            assert model.own.grad.tolist() == [1.0 + group.rank] * 2
            assert model.table.tolist() == [float(group.rank)] * (1 + group.rank)
            if step == 0:
                weight, bias = model[0].weight.grad, model[0].bias.grad
                both = group.all_gather(weight.contiguous()).wait()
                assert torch.equal(both[0], both[1])
                ones = group.all_gather(bias.contiguous()).wait()
                torch.testing.assert_close(ones[1], 2 * ones[0], rtol=1e-3, atol=1e-4)
    assert model.own.tolist() == [float(group.rank)] * 2


@on_ranks(1)
def test_an_unknown_name_is_refused(group: shoal.ProcessGroup) -> None:
    with pytest.raises(UsageError, match=r"names 'nothing', which Sequential does not have"):
        wrapped(group, params_and_buffers_to_ignore=["nothing"])


@on_ranks(1)
def test_a_model_of_ignored_parameters_has_nothing_to_train(group: shoal.ProcessGroup) -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        wrapped(group, nn.Linear(2, 2), params_and_buffers_to_ignore=["weight", "bias"])
