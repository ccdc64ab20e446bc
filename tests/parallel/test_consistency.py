"""Digests of nested values, which ranks compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import UsageError
from shoal.parallel.consistency import Digest


def digest(value: Any) -> bytes:
    made = Digest()
    made.add("value", value)
    return made.value()


def test_equal_values_have_equal_digests_whatever_the_order_of_their_keys() -> None:
    first = {"a": [torch.ones(2), (1, "x")], "b": {2: None}}
    second = {"b": {2: None}, "a": [torch.ones(2), (1, "x")]}
    assert digest(first) == digest(second)
    assert digest(first) != digest({**first, "a": [torch.zeros(2), (1, "x")]})


def test_a_value_that_is_too_deep_or_contains_itself_is_refused() -> None:
    deep: list[Any] = [1]
    for _ in range(100_000):
        deep = [deep]
    circle: list[Any] = []
    circle.append(circle)
    for value in (deep, circle):
        with pytest.raises(UsageError, match="value: values are nested more than 1000 levels deep"):
            digest(value)
