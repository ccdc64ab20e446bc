"""Programs whose changes look like none, as those of :mod:`.changing`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.controller.changing import NODE, Step, _around, _replays, _set


@_replays(4)
def number_of_the_master_changed_where_torch_does_not_count(step: Step) -> list[Any]:
    array, scale, rest = np.array(2.0), torch.tensor(2.0), torch.tensor(float("nan"))
    shared = torch.from_numpy(array)
    multiply = step(lambda a: a * shared * scale.item() + rest.nan_to_num())
    found = _around(multiply, _set(array, ..., 5.0))
    found += _around(multiply, lambda: scale.data.fill_(3.0))
    return found + _around(multiply, lambda: setattr(rest, "data", torch.tensor(1.0)))


@_replays(4)
def number_made_in_inference_mode(step: Step) -> list[Any]:
    with torch.inference_mode():
        scale = torch.tensor(2.0)
    return _around(step(lambda a: a * scale), torch.inference_mode()(lambda: scale.add_(1)))


@_replays(4)
def object_of_a_set(step: Step) -> list[Any]:
    chosen = {functools.partial(torch.mul, other=2.0)}

    def change() -> None:
        chosen.clear()
        chosen.add(functools.partial(torch.mul, other=5.0))

    return _around(step(lambda a: next(iter(chosen))(a)), change)


@_replays(4)
def keywords_of_functions(step: Step) -> list[Any]:
    def add(a: Tensor, *, by: float = 2.0) -> Tensor:
        return a + by

    multiply = functools.partial(torch.mul, other=2.0)
    both = step(lambda a: multiply(add(a)))
    found = _around(both, lambda: setattr(add, "__kwdefaults__", {"by": 3.0}))
    return found + _around(both, _set(multiply.keywords, "other", 5.0))


@_replays(4)
def attribute_named_by_a_text(step: Step) -> list[Any]:
    class Settings:
        def __init__(self) -> None:
            self.rate = self.by = 2.0

    settings = Settings()
    both = step(lambda a: a * getattr(settings, "rate", 1.0) + vars(settings)["by"])
    found = _around(both, lambda: setattr(settings, "rate", 5.0))
    return found + _around(both, lambda: setattr(settings, "by", 5.0))


@_replays(4)
def object_whose_attributes_are_in_a_store(step: Step) -> list[Any]:
    class Store:
        __slots__ = ("held",)

        def __init__(self) -> None:
            self.held = {"rate": 2.0}

        def __getattr__(self, name: str) -> Any:
            return self.held[name]  # a KeyError, if there is none

    store = Store()
    return _around(step(lambda a: a * store.rate), _set(store.held, "rate", 5.0))


@_replays(4)
def hook_in_the_place_of_another(step: Step) -> list[Any]:
    w, factor = torch.ones(2, device=NODE, requires_grad=True), [2.0]

    def backward(a: Tensor) -> Tensor:
        w.grad = None
        (a * w).sum().backward()
        assert w.grad is not None
        return w.grad.clone()

    handle = w.register_hook(lambda grad: grad * 2)
    backwards = step(backward)

    def change() -> None:
        handle.remove()
        w.register_hook(lambda grad: grad * factor[0] * 3)

    return _around(backwards, change) + _around(backwards, _set(factor, 0, 7.0))
