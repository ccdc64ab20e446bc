"""A default device of the program, "meta" here, does not concern what the wrapper and its errors allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ModelMismatch, UnusedParameterError
from shoal.parallel import hooks
from tests.parallel.models import Experts, batches, fixed, loss_of, mlp, part, sentences, words
from tests.parallel.training import on_ranks, wrapped


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {"static_graph": True},
        {"mixed_precision": shoal.MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)},
        {"hook": hooks.quantization_perchannel_hook},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@on_ranks(2)
def test_a_model_trains_as_without_it(group: shoal.ProcessGroup, options: dict[str, Any]) -> None:
    def trained() -> list[torch.Tensor]:
        with torch.device("cpu"):
            model = wrapped(group, mlp(), **options)
            data = [part(batch, group) for batch in batches(2 + group.rank)]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for batch in data:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    expected = trained()
    with torch.device("meta"):
        found = trained()
    torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_power_sgd_and_sparse_gradients_do_not_follow_it(group: shoal.ProcessGroup) -> None:
    sentence = part(sentences(1)[0], group)
    model, table = wrapped(group, mlp()), wrapped(group, words())
    batch = part(batches(1)[0], group)
    model.register_comm_hook(hooks.PowerSGDState(group, start_powerSGD_iter=2), hooks.powerSGD_hook)
    with torch.device("meta"):
        for _ in range(4):
            loss_of(model, batch).backward()
        loss_of(table, sentence).backward()
        optimizer = shoal.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, group=group, lr=0.1, momentum=0.9,
            parameters_as_bucket_view=True,
        )  # fmt: skip
        optimizer.step()
        optimizer.consolidate_state_dict(to=0)
    assert all(parameter.grad.device.type == "cpu" for parameter in (*model.parameters(),))


@on_ranks(2)
def test_errors_are_those_that_they_are_without_it(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, fixed(Experts(2)))
    with torch.device("meta"):
        with pytest.raises(UnusedParameterError, match=r"rank 0: 'experts.0"):
            model(torch.ones(2, 6, device="cpu")).sum().backward()
        with pytest.raises(ModelMismatch, match="rank 1: parameter 'weight'"):
            wrapped(group, nn.Linear(2, 2 + group.rank, device="cpu"))
