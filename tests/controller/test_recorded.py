"""Recorded steps: what they compute, what they see change, what they refuse, and what fails in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.controller import Master
from tests.controller.compare import differences
from tests.controller.trainings import TRAININGS, copied, state

NODE = "node:0"
STEPS = 8


@pytest.mark.parametrize("name", TRAININGS)
def test_a_recorded_step_trains_as_an_eager_one_and_a_local_one(master: Master, name: str) -> None:
    torch.manual_seed(3)
    data = [(torch.randn(12, 1, 8, 8), torch.randint(0, 10, (12,))) for _ in range(STEPS)]
    results = []
    for device, recorded in (("cpu", False), (NODE, False), (NODE, True)):
        step, changed = TRAININGS[name](device)
        call: Any = master.recorded(step) if recorded else step
        torch.manual_seed(2)
        returned = [call(x.to(device), y.to(device)) for x, y in data]
        assert all(loss.requires_grad for loss, _ in returned)
        results.append(copied((returned, state(changed))))
        if recorded:
            assert call.recordings + call.replays == STEPS
            assert call.replays >= STEPS - 5
    assert not differences(master, results[0], results[1])
    assert not differences(master, results[0], results[2])


# -- what changes between calls ----------------------------------------------------------------


def test_inputs_are_told_apart_by_their_metadata_and_numbers_by_value(master: Master) -> None:
    @master.recorded
    def scaled(x: Tensor, factor: float, more: dict[str, list[Tensor]]) -> Tensor:
        return (x * factor).sum() + more["a"][0]

    for length in (3, 4):
        for factor in (2.0, 3.0):
            for value in range(5):
                x = torch.full((length,), float(value), device=NODE)
                more = {"a": [torch.tensor([float(value)], device=NODE)]}
                assert scaled(x, factor, more).item() == length * factor * value + value
    assert scaled.recordings == 8


def test_one_tensor_passed_twice_is_no_two_tensors(master: Master) -> None:
    @master.recorded
    def add(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    for _ in range(4):
        x = torch.zeros(2, device=NODE)
        assert add(x, x).tolist() == [2, 2]
    for value in range(4):
        x, y = torch.zeros(2, device=NODE), torch.full((2,), float(value), device=NODE)
        assert add(x, y).tolist() == [1 + value, 1 + value]
        assert x.tolist() == [1, 1]  # written to in place
    assert add.replays == 4


class _Box:
    factor = 1.0


def _changes(net: nn.Module, opt: torch.optim.Optimizer, box: _Box) -> dict[str, Callable[[], Any]]:
    first: Any = net[0]  # type: ignore[index]
    last: Any = net[-1]  # type: ignore[index]

    def rate() -> None:
        opt.param_groups[0]["lr"] = 0.5

    def data() -> None:
        first.weight.data = torch.ones_like(first.weight)

    def parameter() -> None:
        last.bias = nn.Parameter(torch.ones_like(last.bias))

    def dropout() -> None:
        net[1].p = 0.9  # type: ignore[index, assignment, union-attr]

    def factor() -> None:
        box.factor = 3.0

    def hook() -> None:
        last.register_forward_hook(lambda module, given, made: made * 2)

    def grads() -> None:
        opt.zero_grad()

    return {
        "eval": net.eval, "rate": rate, "data": data, "parameter": parameter, "dropout": dropout,
        "factor": factor, "hook": hook, "frozen": lambda: first.weight.requires_grad_(False), "grads": grads,
        "layer": lambda: net.append(nn.Tanh()),  # type: ignore[operator]
    }  # fmt: skip


@pytest.mark.parametrize("change", _changes(nn.Sequential(nn.Linear(1, 1)), None, _Box()))  # type: ignore[arg-type]
def test_what_changes_between_calls_is_seen(master: Master, change: str) -> None:
    results = []
    for recorded in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(NODE)
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        box = _Box()

        def step(x: Tensor) -> Tensor:
            loss = (net(x) * box.factor).square().mean()  # noqa: B023
            loss.backward()
            opt.step()  # noqa: B023
            opt.zero_grad(set_to_none=False)  # noqa: B023
            return loss

        call: Any = master.recorded(step) if recorded else step
        xs = [torch.randn(6, 8).to(NODE) for _ in range(12)]
        losses = [call(x) for x in xs[:6]]
        if recorded:
            assert call.replays >= 2
        _changes(net, opt, box)[change]()
        before = call.recordings if recorded else 0
        losses += [call(x) for x in xs[6:]]
        if recorded:
            assert call.recordings > before
        results.append(copied((losses, state((net, opt)))))
    assert not differences(master, results[0], results[1])


def test_gradients_that_are_made_anew_are_where_an_eager_call_leaves_them(master: Master) -> None:
    results = []
    for recorded in (False, True):
        torch.manual_seed(1)
        net = nn.Linear(4, 4).to(NODE)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        def grads(x: Tensor) -> None:
            net(x).square().mean().backward()  # noqa: B023

        call: Any = master.recorded(grads) if recorded else grads
        for _ in range(4):
            for _ in range(3):  # the first makes the gradients, the others add to them
                call(torch.randn(2, 4).to(NODE))
            opt.step()
            opt.zero_grad()
        if recorded:
            assert call.replays >= 6
        call(torch.ones(2, 4, device=NODE))
        results.append(copied(state((net, opt))))
    assert not differences(master, results[0], results[1])


def test_results_are_tensors_of_their_own_and_have_no_graph(master: Master) -> None:
    weight = torch.ones(3, device=NODE, requires_grad=True)

    @master.recorded
    def product(x: Tensor) -> dict[str, Any]:
        return {"sum": (x * weight).sum(), "same": x, "name": "product", "none": None}

    losses = [product(torch.full((3,), float(value), device=NODE)) for value in range(6)]
    assert product.replays == 4
    assert [each["sum"].item() for each in losses] == [0, 3, 6, 9, 12, 15]
    assert losses[5]["same"].tolist() == [5, 5, 5]
    assert (losses[5]["name"], losses[5]["none"]) == ("product", None)
    assert losses[5]["sum"].requires_grad
    with pytest.raises(RuntimeError, match="inside the function that is recorded"):
        losses[5]["sum"].backward()


def test_what_the_function_keeps_is_written_over(master: Master) -> None:
    kept: dict[str, Tensor] = {"last": torch.zeros(2, device=NODE)}

    @master.recorded
    def keep(x: Tensor) -> Tensor:
        kept["last"] = x + 1
        return x * 2

    for value in range(6):
        keep(torch.full((2,), float(value), device=NODE))
        assert kept["last"].tolist() == [value + 1, value + 1]
    assert keep.replays == 4


def test_a_tensor_of_the_master_is_moved_anew_by_every_call(master: Master) -> None:
    @master.recorded
    def moved(x: Tensor, lengths: Tensor) -> Tensor:
        return x.to(NODE) * 2 + torch.tensor(1.0) + lengths.sum().item()

    for value in range(5):
        assert moved(torch.full((2,), float(value)), torch.ones(2)).tolist() == [2 * value + 3] * 2
    assert moved.replays == 3
    for _ in range(3):  # it is read on the master, so it must stay the same
        assert moved(torch.zeros(2), torch.zeros(2)).tolist() == [1, 1]
    assert moved.recordings == 4


def test_random_numbers_and_seeds_inside_are_those_of_eager_calls(master: Master) -> None:
    results = []
    for recorded in (False, True):
        torch.manual_seed(5)

        def draw(x: Tensor) -> list[Tensor]:
            noise = torch.rand_like(x) + torch.randn(4, device=NODE)
            return [F.dropout(x, 0.5), noise, torch.randperm(8, device=NODE)]

        def seeded(x: Tensor) -> Tensor:
            torch.manual_seed(7)
            return torch.rand_like(x)

        steps: list[Any] = (
            [draw, seeded] if not recorded else [master.recorded(each) for each in (draw, seeded)]
        )
        x = torch.ones(4, device=NODE)
        drawn = [steps[0](x) for _ in range(6)]
        same = [steps[1](x) for _ in range(6)] + [torch.rand(2, device=NODE)]
        if recorded:
            assert [each.replays for each in steps] == [4, 4]
        results.append(copied((drawn, same)))
    assert not differences(master, results[0], results[1])


def test_a_step_within_a_step_is_part_of_it(master: Master) -> None:
    inner = master.recorded(lambda x: x + 1)
    outer = master.recorded(lambda x: inner(x) * 2)
    for value in range(5):
        assert outer(torch.full((1,), float(value), device=NODE)).item() == 2 * value + 2
    assert (outer.replays, inner.replays, inner.recordings) == (3, 0, 0)


# -- what is refused ---------------------------------------------------------------------------


def _refused(step: Any, *args: Any, calls: int = 5) -> str:
    for _ in range(calls - 1):
        step(*args)
    with pytest.raises(shoal.RecordingMismatch) as caught:
        step(*args)
    return str(caught.value)


def test_a_wait_inside_is_refused_at_its_line(master: Master) -> None:
    def waits(x: Tensor) -> float:
        return x.sum().item()

    def asks(x: Tensor) -> Tensor:
        return x[x > 0]

    x = torch.ones(3, device=NODE)
    text = _refused(master.recorded(waits), x, calls=1)
    assert "return x.sum().item()" in text
    assert "test_recorded.py" in text
    assert "after the call" in text
    assert "return x[x > 0]" in _refused(master.recorded(asks), x, calls=1)
    assert waits(x) == 3


def test_a_tensor_of_the_master_that_is_no_argument_is_refused(master: Master) -> None:
    outside = torch.randn(3)
    assert "argument" in _refused(
        master.recorded(lambda x: x + outside.to(NODE)), torch.ones(3, device=NODE), calls=1
    )


def test_numbers_that_differ_in_every_call_are_refused_in_the_fifth(master: Master) -> None:
    parameter = nn.Parameter(torch.ones(3, device=NODE))
    opt = torch.optim.Adam([parameter], lr=0.1, foreach=False)

    @master.recorded
    def step() -> None:
        parameter.grad = None
        parameter.sum().backward()
        opt.step()

    text = _refused(step)
    assert "fused=True" in text
    assert "opt.step()" in text
    assert "aten." in text
    assert step.recordings == 5

    rate = iter(range(10))
    opt = torch.optim.SGD([parameter], lr=0.1)

    def scheduled() -> None:
        opt.param_groups[0]["lr"] = 0.1 / (1 + next(rate))
        parameter.grad = torch.ones_like(parameter)
        opt.step()

    assert "lr" in _refused(master.recorded(scheduled))


def test_arguments_that_come_once_while_a_rate_lasts_are_no_error(master: Master) -> None:
    """As the last, shorter batch of each epoch does."""
    weight = torch.ones(3, device=NODE, requires_grad=True)
    opt = torch.optim.SGD([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    @master.recorded
    def step(x: Tensor) -> None:
        opt.zero_grad()
        (weight * x).sum().backward()
        opt.step()

    rate, expected = 0.1, torch.ones(3)
    for _ in range(7):
        for rows in (2, 2, 2, 1):
            step(torch.ones(rows, 3, device=NODE))
            expected -= rate * rows
        schedule.step()
        rate *= 0.5
    torch.testing.assert_close(weight.detach().cpu(), expected)
    assert step.replays >= 5


def test_operations_that_differ_in_every_call_are_refused_in_the_fifth(master: Master) -> None:
    turns: list[int] = []

    def turn(x: Tensor) -> Tensor:
        turns.append(1)
        return x.exp() if len(turns) % 2 else x.log()

    text = _refused(master.recorded(turn), torch.ones(3, device=NODE))
    assert "turns" in text or "aten.exp" in text


def test_a_tensor_that_every_call_makes_for_the_next_is_refused(master: Master) -> None:
    state = {"h": torch.zeros(2, device=NODE)}

    @master.recorded
    def carry(x: Tensor) -> None:
        state["h"] = state["h"] * 0.5 + x

    assert "argument" in _refused(carry, torch.ones(2, device=NODE))


def test_tensors_of_an_earlier_master_are_not_taken_for_those_of_a_step(no_master: None) -> None:
    def step(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x * 1.0 + 1.0
        return x.sum()

    with shoal.init_master_worker(workers=1):
        held = [torch.ones(2, device="node:0") for _ in range(100)]  # their ids are given again
    with shoal.init_master_worker(workers=1) as master:
        recorded = master.recorded(step)
        x = torch.zeros(2, device="node:0")
        sums = [recorded(x) for _ in range(100)]
        assert recorded.replays > 90
        assert [each.shape for each in sums] == [()] * 100
        assert [each.tolist() for each in sums] == [40.0] * 100
    assert len(held) == 100
