"""Programs that change something between the calls of a step, or in them; recorded, they see the same.

Each is given what makes a function a step, and returns what it has seen.
"""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NODE = "node:0"
#: makes a function a step
Step = Callable[[Callable[..., Any]], Callable[..., Any]]
Program = Callable[[Step], list[Any]]

#: by name, with how many of its calls are replays at least
PROGRAMS: dict[str, tuple[Program, int]] = {}


def _replays(count: int) -> Callable[[Program], Program]:
    def mark(fn: Program) -> Program:
        PROGRAMS[fn.__name__] = fn, count
        return fn

    return mark


def _ones() -> Tensor:
    return torch.ones(2, device=NODE)


def _around(step: Callable[..., Any], change: Callable[[], Any], *more: Any) -> list[Any]:
    """What four calls give, and four after a change."""
    found = [step(_ones(), *more) for _ in range(4)]
    change()
    return found + [step(_ones(), *more) for _ in range(4)]


def _set(container: Any, key: Any, value: Any) -> Callable[[], None]:
    return lambda: container.__setitem__(key, value)


# -- numbers, wherever they are ------------------------------------------------------------------


@_replays(4)
def attribute_of_a_class(step: Step) -> list[Any]:
    class Settings:
        rate = 2.0

    return _around(step(lambda a: a * Settings.rate), lambda: setattr(Settings, "rate", 5.0))


@_replays(4)
def attribute_in_slots(step: Step) -> list[Any]:
    class Settings:
        __slots__ = ("rate",)

    settings = Settings()
    settings.rate = 2.0  # type: ignore[attr-defined]
    return _around(
        step(lambda a: a * settings.rate),  # type: ignore[attr-defined]
        lambda: setattr(settings, "rate", 5.0),
    )


@_replays(4)
def property_and_operator(step: Step) -> list[Any]:
    class Settings:
        def __init__(self) -> None:
            self._rate = 2.0

        @property
        def rate(self) -> float:
            return self._rate

        def __getitem__(self, at: int) -> float:
            return self._rate * at

    settings = Settings()
    return _around(step(lambda a: a * settings.rate + settings[2]), lambda: setattr(settings, "_rate", 5.0))


@_replays(4)
def function_that_is_decorated(step: Step) -> list[Any]:
    rates = [2.0]

    @torch.no_grad()
    def scaled(a: Tensor) -> Tensor:
        return a * rates[0]

    return _around(step(lambda a: scaled(a)), _set(rates, 0, 5.0))


@_replays(4)
def array(step: Step) -> list[Any]:
    rates = np.array([2.0, 3.0])
    return _around(step(lambda a: a * float(rates[0])), _set(rates, 0, 5.0))


@_replays(4)
def array_as_an_argument(step: Step) -> list[Any]:
    rates = np.array([2.0, 3.0])
    return _around(step(lambda a, given: a * float(given[0])), _set(rates, 0, 5.0), rates)


@_replays(4)
def long_list(step: Step) -> list[Any]:
    rates = [1.0] * 3000
    return _around(step(lambda a: a * rates[7]), _set(rates, 7, 5.0))


@_replays(4)
def queue(step: Step) -> list[Any]:
    rates = collections.deque([2.0, 3.0])
    return _around(step(lambda a: a * rates[0]), _set(rates, 0, 5.0))


@_replays(4)
def set_of_names(step: Step) -> list[Any]:
    names = {"a"}
    return _around(step(lambda a: a * (2 if "b" in names else 3)), lambda: names.add("b"))


@_replays(4)
def tensor_in_a_list(step: Step) -> list[Any]:
    held = [_ones()]
    return _around(step(lambda a: a + held[0]), lambda: _set(held, 0, _ones() * 5)())


@_replays(3)
def number_of_a_tensor_of_the_master(step: Step) -> list[Any]:
    """It is moved and read: a replay must not use what was read before."""
    call = step(lambda x: x.to(NODE) * x[0].item() + int(x.numpy()[1]))
    return [call(torch.tensor(each)) for each in ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [3.0, 2.0]) * 2]


# -- functions, classes, hooks ---------------------------------------------------------------------


@_replays(4)
def defaults_of_a_function(step: Step) -> list[Any]:
    def scaled(a: Tensor, rate: float = 2.0) -> Tensor:
        return a * rate

    return _around(step(scaled), lambda: setattr(scaled, "__defaults__", (7.0,)))


@_replays(4)
def code_of_a_function(step: Step) -> list[Any]:
    def scaled(a: Tensor) -> Tensor:
        return a * 2

    return _around(step(lambda a: scaled(a)), lambda: setattr(scaled, "__code__", (lambda a: a * 3).__code__))


@_replays(6)
def methods_that_are_replaced(step: Step) -> list[Any]:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net = Net()
    call = step(lambda a: net(a))
    found = _around(call, lambda: setattr(Net, "forward", lambda self, x: x * 3))
    net.forward = lambda x: x * 5  # type: ignore[method-assign]
    return found + [call(_ones()) for _ in range(4)]


@_replays(4)
def class_of_an_object(step: Step) -> list[Any]:
    class Double:
        def scaled(self, x: Tensor) -> Tensor:
            return x * 2

    class Fourfold(Double):
        def scaled(self, x: Tensor) -> Tensor:
            return x * 4

    held = Double()
    return _around(step(lambda a: held.scaled(a)), lambda: setattr(held, "__class__", Fourfold))


@_replays(3)
def hook_of_a_tensor(step: Step) -> list[Any]:
    weight = _ones().requires_grad_()

    @step
    def call(a: Tensor) -> Tensor:
        weight.grad = None
        (weight * a).sum().backward()
        assert weight.grad is not None
        return weight.grad * 1

    return _around(call, lambda: weight.register_hook(lambda grad: grad * 7))  # type: ignore[no-untyped-call]


@_replays(4)
def hook_of_all_modules(step: Step) -> list[Any]:
    net = nn.Linear(2, 2).to(NODE)
    hooks: list[Any] = []
    register = nn.modules.module.register_module_forward_hook
    try:
        return _around(
            step(lambda a: net(a).detach()),
            lambda: hooks.append(register(lambda module, given, made: made * 3)),
        )
    finally:
        hooks[0].remove()


@_replays(3)
def hook_of_an_optimiser(step: Step) -> list[Any]:
    weight = _ones().requires_grad_()
    opt = torch.optim.SGD([weight], lr=1.0)

    @step
    def call(a: Tensor) -> None:
        opt.zero_grad()
        (weight * a).sum().backward()
        opt.step()

    _around(call, lambda: opt.register_step_post_hook(lambda *given: weight.data.mul_(2)))
    return [weight.detach()]


# -- what a call does at the master ----------------------------------------------------------------


@_replays(2)
def device_of_the_caller(step: Step) -> list[Any]:
    call = step(lambda: torch.ones(2) * 2)
    found = []
    for node in (0, 0, 0, 0, 1, 1, 1):
        with torch.device("node", node):
            found.append(call())
        assert found[-1].get_node() == node
    return found


@_replays(0)
def random_numbers_of_python(step: Step) -> list[Any]:
    random.seed(0)
    call = step(lambda a: a * 2 if random.random() < 0.9 else a * 3)
    return [call(_ones()) for _ in range(4)]


@_replays(0)
def shape_of_an_argument(step: Step) -> list[Any]:
    call = step(lambda a: a.t_() + 1)
    found = []
    for _ in range(4):
        x = torch.arange(6.0, device=NODE).view(2, 3)
        found += [call(x), x]
    return found


def _modified(made: Callable[[], Tensor], call: Callable[[], Any]) -> list[Any]:
    """Whether autograd notices that what a graph needs was written to."""
    loss = made()
    call()
    try:
        loss.backward()
    except RuntimeError as error:
        return ["modified by an inplace operation" in str(error)]
    return ["no error"]


@_replays(3)
def parameter_that_a_graph_needs(step: Step) -> list[Any]:
    weight = _ones().requires_grad_()

    @step
    def double() -> None:
        with torch.no_grad():
            weight.mul_(2)

    for _ in range(4):
        double()
    return _modified(lambda: (weight * weight).sum(), double)


@_replays(3)
def argument_that_a_graph_needs(step: Step) -> list[Any]:
    weight, x = _ones().requires_grad_(), _ones()
    add = step(lambda a: a.add_(1))
    for _ in range(4):
        add(_ones())
    return _modified(lambda: (weight * x).sum(), lambda: add(x))


@_replays(4)
def error_of_the_function(step: Step) -> list[Any]:
    wrong: list[bool] = [False]

    @step
    def call(a: Tensor) -> Tensor:
        y = a + 1
        if wrong[0]:
            raise KeyError("wrong")
        return y

    found: list[Any] = [call(_ones()) for _ in range(4)]
    wrong[0] = True
    try:
        call(_ones())
    except KeyError:
        found.append("raised")
    wrong[0] = False
    return found + [call(_ones()) for _ in range(3)]


@_replays(3)
def recursion(step: Step) -> list[Any]:
    def count(a: Tensor, n: int) -> Any:
        return a if not n else call(a + n, n - 1)

    call = step(count)
    return [call(_ones(), 3) for _ in range(5)]


# -- arguments ---------------------------------------------------------------------------------------


@_replays(2)
def memory_that_two_arguments_share(step: Step) -> list[Any]:
    call = step(lambda a, b: a.to(NODE) * 2 + b.to(NODE))
    found = []
    for value in range(4):
        x = torch.full((2,), float(value))
        found.append(call(x, x.detach()))
    return [*found, call(torch.ones(2), torch.zeros(2))]


@_replays(4)
def parts_of_a_tensor_of_the_master(step: Step) -> list[Any]:
    call = step(lambda x: x[0].to(NODE) + x[1:, :2].to(NODE) * 2)
    return [call(torch.full((3, 2), float(value))) for value in range(6)]


@_replays(4)
def named_tuple(step: Step) -> list[Any]:
    pair = collections.namedtuple("pair", "x y")
    call = step(lambda given: given.x + given.y * 2)
    return [call(pair(torch.full((2,), float(value), device=NODE), _ones())) for value in range(6)]


@_replays(4)
def views_that_are_written_to(step: Step) -> list[Any]:
    base = torch.zeros(4, 4, device=NODE)

    @step
    def call(row: Tensor, x: Tensor) -> Any:
        row.add_(x)
        base[1].copy_(x)
        base.view(-1)[3:7].mul_(2)
        return base.sum(), row * 1

    found: list[Any] = []
    for value in range(10):
        found += call(base[value % 2], torch.full((4,), float(value), device=NODE))
    return [*found, base]


@_replays(4)
def results_of_all_forms(step: Step) -> list[Any]:
    call = step(lambda x: (x, x.detach(), x.view(-1), [x.sum(), {"twice": (x * 2, 3, None)}]))
    found: list[Any] = []
    for value in range(6):
        a, b, c, (d, e) = call(torch.full((2, 2), float(value), device=NODE))
        a.add_(1)
        found += [a.clone(), b.clone(), c.clone(), d, *e["twice"]]
    return found


# -- gradients ---------------------------------------------------------------------------------------


@_replays(2)
def transforms(step: Step) -> list[Any]:
    call = step(lambda a: (a * 2).sum())
    x = torch.arange(6.0, device=NODE).view(3, 2)
    found = [call(x[0]) for _ in range(4)]
    return [*found, torch.func.vmap(call)(x), torch.func.grad(call)(x[0])]


@_replays(8)
def modes_of_autograd(step: Step) -> list[Any]:
    weight = _ones().requires_grad_()

    @step
    def call(a: Tensor) -> Tensor:
        total = (a * weight).sum()
        if total.requires_grad:
            total.backward()
        return total.detach()

    found = [call(_ones()) for _ in range(4)]
    with torch.no_grad():
        found += [call(_ones()) for _ in range(4)]
    with torch.inference_mode():
        found += [call(_ones()) + 0 for _ in range(4)]
    found += [call(_ones()) for _ in range(4)]
    return [*found, weight.grad]


@_replays(8)
def rate_that_a_scheduler_sets(step: Step) -> list[Any]:
    weight = _ones().requires_grad_()
    opt = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 5, 0.5)

    @step
    def call(a: Tensor) -> None:
        opt.zero_grad()
        (weight * a).square().sum().backward()
        opt.step()

    for _ in range(20):
        call(_ones() * 0.1)
        schedule.step()
    return [weight.detach()]


@_replays(10)
def gradients_of_several_calls(step: Step) -> list[Any]:
    weight = _ones().requires_grad_()
    opt = torch.optim.SGD([weight], lr=0.1)

    @step
    def call(a: Tensor, last: bool) -> None:
        (weight * a).square().sum().backward()
        if last:
            opt.step()
            opt.zero_grad()

    for value in range(24):
        call(torch.full((2,), value * 0.1, device=NODE), value % 4 == 3)
    return [weight.detach(), weight.grad]


@_replays(1)
def gradients_of_others(step: Step) -> list[Any]:
    """The step lets go of gradients that were made before it, and leaves those of others alone."""
    weight, other = _ones().requires_grad_(), _ones().requires_grad_()

    @step
    def call(a: Tensor) -> Tensor:
        weight.grad = None
        return a * weight.detach() + other.detach()

    found: list[Any] = []
    for value in range(5):
        other.grad = torch.full((2,), float(value), device=NODE)
        weight.grad = torch.full((2,), float(value), device=NODE)
        found += [call(_ones()), weight.grad, other.grad]
    return found


@_replays(2)
def parameters_that_are_made_inside(step: Step) -> list[Any]:
    @step
    def call(a: Tensor) -> Any:
        layer = nn.Linear(2, 2, device=NODE)
        nn.init.constant_(layer.weight, 2.0)
        nn.init.constant_(layer.bias, 1.0)
        layer(a).sum().backward()
        return layer.weight.grad

    return [call(_ones()) for _ in range(4)]


@_replays(2)
def partial_and_method(step: Step) -> list[Any]:
    class Net:
        def __init__(self) -> None:
            self.weight = _ones()

        def scaled(self, x: Tensor, by: float) -> Tensor:
            return x * self.weight * by

    net = Net()
    call = step(functools.partial(net.scaled, by=3.0))
    return _around(call, lambda: setattr(net, "weight", _ones() * 2))
