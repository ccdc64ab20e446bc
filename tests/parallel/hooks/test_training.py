"""Whole training runs with each hook: the ranks stay equal, the loss falls, and near to where it should."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.parallel import hooks
from shoal.testing import run_threads
from tests.parallel.models import Batch, batches, loss_of, mlp, part
from tests.parallel.training import assert_close, assert_same_bits, on_ranks, sgd, values, wrapped

DATA = batches(1) * 12

Run = tuple[list[float], list[torch.Tensor]]


def train(
    group: shoal.ProcessGroup,
    hook: hooks.CommHook | None = None,
    state: object = None,
    data: Sequence[Batch] = DATA,
    make_hook: Callable[[torch.optim.Optimizer], hooks.CommHook] | None = None,
    **options: Any,
) -> Run:
    """The losses of this rank's parts, and the parameters at the end."""
    own = mlp()
    model = wrapped(group, own, **options)
    optimizer = sgd(model)
    if make_hook is not None:
        hook = make_hook(optimizer)
    if hook is not None:
        model.register_comm_hook(state, hook)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model, part(batch, group))
        loss.backward()
        if make_hook is None:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, values(own)


@pytest.fixture(scope="module")
def plain() -> list[Run]:
    return run_threads(train, 2)


#: hook, state of a rank, how far the loss at the end may be from that of plain training
CASES: dict[str, tuple[hooks.CommHook, Callable[[], object], float]] = {
    "all-reduce": (hooks.allreduce_hook, lambda: None, 0.0),
    "float16": (hooks.fp16_compress_hook, lambda: None, 0.01),
    "bfloat16": (hooks.bf16_compress_hook, lambda: None, 0.02),
    "bytes, one range": (hooks.quantization_pertensor_hook, lambda: None, 0.1),
    "bytes": (hooks.quantization_perchannel_hook, lambda: None, 0.1),
    "PowerSGD": (hooks.powerSGD_hook, lambda: hooks.PowerSGDState(None, 2, 2), 0.3),
    "PowerSGD at once": (hooks.powerSGD_hook, lambda: hooks.PowerSGDState(None, 2, 0), 0.3),
    "PowerSGD in halves": (
        hooks.bf16_compress_wrapper(hooks.powerSGD_hook),
        lambda: hooks.PowerSGDState(None, 2, 2),
        0.3,
    ),
    "batched PowerSGD": (hooks.batched_powerSGD_hook, lambda: hooks.PowerSGDState(None, 2, 2), 0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_with_every_hook(name: str, plain: list[Run]) -> None:
    hook, state, tolerance = CASES[name]
    results = run_threads(lambda group: train(group, hook, state()), 2)
    assert_same_bits(results[0][1], results[1][1])
    start, end = (sum(losses[i] for losses, _ in results) for i in (0, -1))
    expected = sum(losses[-1] for losses, _ in plain)
    assert end < 0.8 * start
    assert abs(end - expected) <= tolerance * expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("float16", {"gradient_as_bucket_view": False}),
        ("bytes", {"find_unused_parameters": True}),
        ("PowerSGD", {"static_graph": True}),
    ],
)
def test_hooks_do_the_same_in_every_mode_of_the_reducer(name: str, options: dict[str, Any]) -> None:
    hook, state, _ = CASES[name]
    data = DATA[:5]
    expected = run_threads(lambda group: train(group, hook, state(), data), 2)
    results = run_threads(lambda group: train(group, hook, state(), data, **options), 2)
    for (_, a), (_, b) in zip(expected, results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    assert_same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("steps", [4, 5])
@on_ranks(2)
def test_power_sgd_begins_at_its_step_and_not_before(group: shoal.ProcessGroup, steps: int) -> None:
    state = hooks.PowerSGDState(None, 1, 4)
    _, plain = train(group, None, None, DATA[:steps])
    _, own = train(group, hooks.powerSGD_hook, state, DATA[:steps])
    assert state.iter == steps
    assert bool(state.compression_stats()[0]) == (steps > 4)
    assert all(map(torch.equal, own, plain)) == (steps == 4)


@on_ranks(2)
def test_training_with_power_sgd_resumes_from_a_pickle(group: shoal.ProcessGroup) -> None:
    """In a new wrapper, whose buckets are in their first order again for one step."""
    own, state = mlp(), hooks.PowerSGDState(group, 1, 2)
    model = wrapped(group, own, bucket_cap_mb=25)
    model.register_comm_hook(state, hooks.powerSGD_hook)
    optimizer = sgd(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        loss_of(model, part(batch, group)).backward()
        optimizer.step()

    for batch in DATA[:5]:
        step(model, optimizer, batch)
    saved = pickle.dumps(state)
    again = copy.deepcopy(own)
    second = wrapped(group, again, bucket_cap_mb=25)
    second.register_comm_hook(pickle.loads(saved), hooks.powerSGD_hook)
    resumed = sgd(second)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in DATA[:4]:
        step(model, optimizer, batch)
        step(second, resumed, batch)
        assert_close(values(own), values(again))


@on_ranks(2)
def test_steps_in_backward_train_as_steps_after_it(group: shoal.ProcessGroup) -> None:
    hook, state, _ = CASES["PowerSGD"]
    losses, parameters = train(group, hook, state())
    overlapped = train(
        group, state=state(), make_hook=lambda optimizer: hooks.hook_then_optimizer(hook, optimizer)
    )
    assert overlapped[0] == losses
    assert_same_bits(overlapped[1], parameters)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, when imported
@on_ranks(2)
def test_optimisers_that_torch_attached_to_parameters_run_in_backward(group: shoal.ProcessGroup) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _, expected = train(group)
    own = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, own.parameters(), {"lr": 0.1, "momentum": 0.9})
    model = wrapped(group, own)
    for batch in DATA:
        loss_of(model, part(batch, group)).backward()
        assert all(parameter.grad is None for parameter in own.parameters())
    assert_same_bits(values(own), expected)


def test_local_sgd_with_an_averager_keeps_neighbours_equal_and_brings_all_together() -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        own = mlp()
        model = wrapped(group, own)
        pair = group.split(group.rank // 2)
        model.register_comm_hook(hooks.PostLocalSGDState(None, pair, 3), hooks.post_localSGD_hook)
        optimizer = shoal.PostLocalSGDOptimizer(sgd(model), shoal.PeriodicModelAverager(4, 3, group=group))
        seen = []
        for batch in batches(9):
            optimizer.zero_grad()
            loss_of(model, part(batch, group)).backward()
            optimizer.step()
            seen.append(values(own))
        pair.close()
        return seen

    results = run_threads(rank, 4)
    for step in range(9):
        first, second, third, fourth = (seen[step] for seen in results)
        assert_same_bits(first, second)
        assert_same_bits(third, fourth)
        assert all(map(torch.equal, first, third)) == (step < 3 or step in (3, 7))
