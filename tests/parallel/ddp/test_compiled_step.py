"""A whole training step under torch.compile: the wrapper's hooks and callbacks run as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.parallel.hooks import allreduce_hook
from tests.parallel.models import Batch, batches, loss_of, mlp
from tests.parallel.training import on_ranks, wrapped
from tests.support.releases import COMPILES_IN_THREADS

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
    pytest.mark.skipif(
        not COMPILES_IN_THREADS, reason="torch 2.11 crashes where a second thread compiles, as ranks do here"
    ),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "skipping": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static": {"static_graph": True},
    "copying": {"gradient_as_bucket_view": False},
    "hook": {"hook": allreduce_hook},
    "copies": {"copies": 2},
    "precision": {"mixed_precision": shoal.MixedPrecision(param_dtype=torch.bfloat16)},
}


@pytest.fixture(autouse=True)
def _from_nothing() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def _trained(step: Any, group: shoal.ProcessGroup, **options: Any) -> list[torch.Tensor]:
    model = wrapped(group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(3):
        step(model, optimizer, batch)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(1)
def test_a_compiled_step_trains_like_a_plain_one(group: shoal.ProcessGroup, name: str) -> None:
    compiled = torch.compile(_step, backend="eager")
    torch.testing.assert_close(
        _trained(compiled, group, **OPTIONS[name]), _trained(_step, group, **OPTIONS[name])
    )


@on_ranks(1)
def test_a_compiled_step_may_use_the_group_and_a_join(group: shoal.ProcessGroup) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        loss = _step(model, optimizer, batch)
        return group.all_reduce(loss.detach() * 2).then(lambda future: future.value() / 2).wait()

    model = wrapped(group, mlp())
    optimizer = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group=group, lr=0.1)
    compiled = torch.compile(step, backend="eager")
    with shoal.Join([model, optimizer]):
        for batch in batches(3):
            compiled(model, optimizer, batch)
    expected = _trained(_step, group)
    torch.testing.assert_close([parameter.detach() for parameter in model.parameters()], expected)


@on_ranks(1)
def test_a_module_compiled_inside_is_compiled_also_in_mixed_precision(group: shoal.ProcessGroup) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    for options in (OPTIONS["plain"], OPTIONS["precision"]):
        graphs.clear()
        torch._dynamo.reset()
        inner: nn.Module = torch.compile(mlp(), backend=backend)
        wrapped(group, inner, **options)(batches(1)[0][0]).sum().backward()
        assert len(graphs) == 1
